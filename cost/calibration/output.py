"""Files that a calibration writes: a device file, and its profile beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from legoai.cost.measurements.file import write_document
from legoai.specs.cluster import profile_path
from legoai.specs.files import replace_file, try_to_replace


class OutputError(ValueError):
    """A file of a calibration that cannot be written."""


def check_output(path: Path) -> None:
    """Check, before anything is measured, that a device file and its profile can be written.

    Raises:
        OutputError: one of them cannot be written.
    """
    for target in (profile_path(path), path):
        with _named(target):
            try_to_replace(target)


def write_output(path: Path, text: str, document: Mapping[str, Any]) -> None:
    """Write a device file, and its profile beside it, both of one calibration where several end together.

    Raises:
        OutputError: one of them cannot be written.
    """
    with _alone_in(path.parent):
        with _named(profile_path(path)):
            write_document(profile_path(path), document)
        with _named(path):
            replace_file(path, text)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other calibration writes into the folder; on a file system without locks, go on at once."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # writing reports it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(target: Path) -> Iterator[None]:
    """Name the file in the error with which writing it fails, instead of the temporary one beside it."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror}") from error
