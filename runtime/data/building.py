"""The cache folder of corpora, and temporary folders in which they are built; interrupted builds are removed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from legoai.runtime.durable import is_full, is_too_large, not_writable
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.specs.cache import user_cache

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


def cache_folder() -> Path:
    """Return LegoAI's folder in the user's cache.

    Raises:
        RunError: the user has no home directory.
    """
    folder = user_cache()
    if folder is None:
        raise RunError(
            RunErrorCode.FOLDER_NOT_WRITABLE,
            "there is no folder to keep the tokens of the corpus in: this user has no home directory",
            help="set XDG_CACHE_HOME to the absolute path of a folder",
        )
    return folder


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Report a cache folder that cannot be written; errors of reading a source, which name its file, pass through.

    Raises:
        RunError: nothing can be written into the folder, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        room = is_full(error) or is_too_large(error)
        if not (room if error.filename is None else _is_around(Path(str(error.filename)), folder)):
            raise
        raise not_writable(
            f"the tokens of the corpus cannot be written into the cache folder {folder}",
            error,
            "set XDG_CACHE_HOME to the absolute path of another folder",
        ) from error


def _is_around(path: Path, folder: Path) -> bool:
    """Whether a path is in a folder, or the folder in it: creating the folder names one of its parents."""
    return path.is_relative_to(folder) or folder.is_relative_to(path)
