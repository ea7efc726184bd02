"""Profile files of devices: reading, and what is wrong with one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from pathlib import Path
from typing import Any, Final

from legoai.specs.cluster import GZIP, device_names, profile_path
from legoai.specs.files import MOST_DATA, read_file, too_large

FORMAT: Final = 1


SECTIONS: Final = (
    "device", "made", "constants", "products", "attention", "movement", "arithmetic", "links", "sources", "held_out",
)  # fmt: skip


class ProfileError(ValueError):
    """A profile is missing, not readable, or incomplete."""


def read_document(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object of a file, compressed or not, and the start of its content's SHA-256.

    Raises:
        ProfileError: the file cannot be read, or holds no JSON object of this format.
    """
    try:
        raw = read_file(path, MOST_DATA)
        text = _decompressed(path, raw) if raw.startswith(GZIP) else raw
        document = json.loads(text)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, EOFError, zlib.error) as error:
        raise ProfileError(f"{path} is no profile: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ProfileError(f"{path} is no profile of format {FORMAT}, but {found}")
    return document, hashlib.sha256(text).hexdigest()[:12]


def _decompressed(path: Path, raw: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        text = file.read(MOST_DATA + 1)
    if len(text) > MOST_DATA:
        raise too_large(path, MOST_DATA)
    return text


def profile_fault(device_file: Path, name: str, *, devices: int = 1) -> str | None:
    """What is wrong with the profile of the device ``name``; None if nothing, or if its sections alone are wrong.

    A device of the catalogue's name needs no profile beside its file.

    Args:
        device_file: beside which it is.
        name: of the device.
        devices: of one host that a plan uses.
    """
    path = profile_path(device_file)
    whose = f"the profile of `{name}`, {path.name},"
    if not path.exists():
        return None if name in device_names() else f"{whose} is missing beside {device_file.name}"
    if not path.is_file():
        return f"{whose} is no file"
    try:
        with path.open("rb") as file:
            start = file.read(64)
        if not start.startswith(GZIP) and not start.lstrip().startswith(b"{"):
            return f"{whose} is neither compressed nor JSON"
        document = read_document(path)[0]
    except OSError as error:
        return f"{whose} cannot be read: {error.strerror}"
    except ProfileError as error:
        return f"{whose} {str(error).removeprefix(f'{path} ')}"
    missing = [section for section in SECTIONS if section not in document]
    if missing:
        return f"{whose} is no complete profile: {', '.join(missing)} missing"
    if not document["products"]:
        return f"{whose} is no complete profile: it has no rate for matrix products"
    if devices > 1 and not document["links"]:
        return f"{whose} has no figures of collectives, and the plan uses {devices} devices of a host"
    return None


def profile_owner(device_file: Path) -> str | None:
    """The device that the profile beside a device file names as its own; None where there is no profile to read."""
    try:
        owner = read_document(profile_path(device_file))[0].get("device")
    except ProfileError:
        return None
    return owner if isinstance(owner, str) else None
