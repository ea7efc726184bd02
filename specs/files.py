"""Reading of files up to a limit, and writing of files: each as a whole or not at all, what is no file as a stream."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from pathlib import Path
from threading import get_ident
from typing import Final

from legoai.specs.units import MIB

MOST_TEXT: Final = 4 * MIB
"""Bytes of a file that a person writes: a plan, a device file, a project's configuration."""
MOST_DATA: Final = 64 * MIB
"""Bytes of a file that a program writes: a model's config, a device's profile, an order. One of 64 ranks and 4,096
micro batches has some 10 MB."""
_DESCRIPTOR: Final = re.compile(r"/dev/(stdout|stderr|fd/\d+)")


class RefusedFileError(OSError):
    """A file is not read: it is no regular file, or larger than any of its kind."""


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes, a whole number of MiB.

    A plan may name any file, and may be a stranger's.

    Raises:
        OSError: the file cannot be read; a `RefusedFileError` where that is for its kind or its size.
        ValueError: the path is no file name.
    """
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise too_large(path, most)
    return content


def require_regular(path: Path) -> None:
    """Check that reading the path comes to an end, as that of a device or a pipe may not.

    Raises:
        RefusedFileError: it is a device, a pipe or a socket.
        OSError: it is missing, is a folder, or cannot be looked at.
        ValueError: the path is no file name.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise RefusedFileError(errno.EINVAL, "it is no regular file", str(path))


def too_large(path: Path, most: int) -> RefusedFileError:
    """The error of a file with more than ``most`` bytes."""
    return RefusedFileError(errno.EFBIG, f"it has more than {most // MIB} MiB", str(path))


def replace_file(path: Path, text: str | bytes) -> None:
    """Write a file atomically; links and permissions are preserved. Devices, pipes and descriptors are written into.

    Raises:
        OSError: there is no such directory, or the directory or the file cannot be written.
    """
    data = text.encode("utf-8") if isinstance(text, str) else text
    if is_stream(path):
        _write_into(path, data)
        return
    target = Path(os.path.realpath(path))
    temporary = _beside(target)
    try:
        temporary.write_bytes(data)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def try_to_replace(path: Path) -> None:
    """Fail as :func:`replace_file` would, where that does not depend on the content; writes nothing.

    Raises:
        OSError: there is no such directory, or the directory or the file cannot be written.
    """
    if is_stream(path):
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    temporary = _beside(target)
    try:
        temporary.touch()
    finally:
        temporary.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    """Return the name under which a file is written before it replaces ``target``."""
    return target.with_name(f".{target.name}.{os.getpid()}.{get_ident()}.tmp")


def is_stream(path: Path) -> bool:
    """Whether the path is a descriptor of this process such as `/dev/stdout`, or that of a device, pipe or socket."""
    return bool(_DESCRIPTOR.fullmatch(str(path))) or (path.exists() and not path.is_file() and not path.is_dir())


def _write_into(path: Path, data: bytes) -> None:
    descriptor = _DESCRIPTOR.fullmatch(str(path))
    if descriptor is None:
        path.write_bytes(data)
        return
    # Opened by its name it would be written from its start, over what this process has written before.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    number = {"stdout": 1, "stderr": 2}.get(descriptor[1]) or int(descriptor[1].rpartition("/")[2])
    with open(os.dup(number), "wb") as own:  # noqa: PTH123 - a descriptor
        own.write(data)
