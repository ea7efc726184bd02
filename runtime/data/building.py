"""Temporary folders in which corpora are built, and removal of those that interrupted builds have left."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "building-"

_LOCK: Final = "lock"
"""Locked by the build of its folder, for as long as its process lives."""

_UNCHANGED_SECONDS: Final = 24 * 3600.0
"""After which the build of a folder without a lock has ended: it writes all the time."""


@contextlib.contextmanager
def building(place: Path) -> Iterator[Path]:
    """Create a temporary folder for one build, and remove those of builds that were interrupted.

    Args:
        place: where the result is moved; created where it is missing.
    """
    place.mkdir(parents=True, exist_ok=True)
    _sweep(place)
    with tempfile.TemporaryDirectory(dir=place, prefix=_PREFIX) as temporary:
        folder = Path(temporary)
        with (folder / f"{_LOCK}.new").open("wb") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / f"{_LOCK}.new").rename(folder / _LOCK)  # so nobody sees it before it is locked
            yield folder


def _sweep(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another's, or another start removes it
            _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    try:
        lock = (folder / _LOCK).open("rb+")
    except FileNotFoundError:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        if time.time() - newest > _UNCHANGED_SECONDS:
            shutil.rmtree(folder)
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the build lives
        shutil.rmtree(folder)
