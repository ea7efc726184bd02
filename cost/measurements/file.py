"""Profile files: reading and writing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from legoai.specs.cluster import GZIP
from legoai.specs.files import MOST_DATA, read_file, replace_file, too_large

FORMAT: Final = 1


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


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a profile atomically, compressed where the name ends in `.gz`, and deterministically.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, **document}, sort_keys=True, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
