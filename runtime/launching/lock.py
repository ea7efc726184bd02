"""Lock on a run's folder, so that two runs never write into one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from legoai.runtime.errors import RunError, RunErrorCode

NAME = "run.lock"
OWNER = "run.owner"
"""Names the process that holds the lock. The file of the lock itself is not written: where a file system has no locks,
its presence is the lock, and its content names the process that made it, without which no other can replace it."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one run, creating it where it is missing; the lock of a process that has ended counts no more.

    Raises:
        RunError: another run holds the lock, or the folder cannot be written.
    """
    lock = acquire(folder)
    try:
        yield
    finally:
        lock.release()


def acquire(folder: Path) -> FileLock:
    """Take the lock of a folder, or raise what :func:`locked` raises."""
    owner = folder / OWNER
    lock = FileLock(folder / NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        owner.write_text(f"{os.getpid()} {socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        raise RunError(
            RunErrorCode.FOLDER_IN_USE,
            f"another run{_owner(owner)} writes into {folder}",
            help="wait for it or stop it, or choose another --out",
        ) from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise RunError(
            RunErrorCode.FOLDER_NOT_WRITABLE,
            f"--out {folder}: nothing can be written there: {error.strerror or error}",
            help="free space there, or choose another --out" if full else "choose another --out",
        ) from error
    return lock


def _owner(file: Path) -> str:
    try:
        pid, host = file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return ""
    return f" (process {pid} on {host})"
