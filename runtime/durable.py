"""Durability of files: they are on disk before they get the names under which they are trusted; and want of room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from legoai.runtime.errors import RunError, RunErrorCode


def sync(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Return whether a file could not be written since the disk, or a quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_too_large(error: OSError) -> bool:
    """Return whether a file could not be written since it may not be so large."""
    return error.errno == errno.EFBIG


def not_writable(what: str, error: OSError, otherwise: str) -> RunError:
    """Return the error to report for a file that could not be written.

    Args:
        what: a clause on the file.
        error: of the system, whose reason follows the clause.
        otherwise: the help, beside what makes room for the file if that is wanting.
    """
    room = "free space there" if is_full(error) else RAISE_LIMIT if is_too_large(error) else ""
    return RunError(
        RunErrorCode.FOLDER_NOT_WRITABLE,
        f"{what}: {error.strerror or error}",
        help=f"{room}, or {otherwise}" if room else otherwise,
    )


RAISE_LIMIT = "raise the limit of a file's size (`ulimit -f`)"
"""What helps a file that may not be so large."""


def write_durably(path: Path, text: str) -> None:
    """Write a text into a file, such that a crash of the host does not lose it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
