"""Locks on a run's folder, so that two runs never write into one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from legoai.runtime.durable import not_writable
from legoai.runtime.errors import RunError, RunErrorCode

RUN: Final = "run"
"""The lock of what writes into a folder: ranks, and before them the command that prepares the folder for them."""

START: Final = "start"
"""The lock of a command that starts ranks and waits for them. They take the other lock when they are there; until then
this one keeps a second command away, and they keep it away where the first one is killed."""


class LockedFolder:
    """A folder whose lock this process holds.

    Args:
        folder: of the run.
        lock: that is held.
    """

    def __init__(self, folder: Path, lock: FileLock) -> None:
        self.folder = folder
        self.file = Path(lock.lock_file)
        self._held = self.file.stat()

    def loss(self) -> RunError | None:
        """Return the error of a folder that has been removed or moved since, or whose lock has; None if it is there."""
        try:
            there = self.file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return RunError(
                RunErrorCode.FOLDER_GONE,
                f"{self.folder}, or {self.file.name} in it, was removed or moved while this run wrote there: metrics, "
                "program and checkpoints may be lost, and nothing keeps another run away",
                help="start it again; --resume FOLDER continues from what was moved",
            )
        except OSError:  # of a disk that fails; what cannot be written there is reported elsewhere
            return None
        if os.path.samestat(there, self._held):
            return None
        return RunError(
            RunErrorCode.FOLDER_IN_USE,
            f"another run{_owner(self.file.with_suffix('.owner'))} writes into {self.folder}, which was removed or "
            "moved while this run wrote there",
            help="choose another --out for one of them; --resume FOLDER continues from what was moved",
        )


@contextlib.contextmanager
def locked(folder: Path, lock: str = RUN) -> Iterator[LockedFolder]:
    """Lock a folder for one run, creating it where it is missing; the lock of a process that has ended counts no more.

    Raises:
        RunError: another run holds the lock, or the folder cannot be written.
    """
    held = acquire(folder, lock)
    try:
        yield LockedFolder(folder, held)
    finally:
        held.release()


def acquire(folder: Path, lock: str = RUN) -> FileLock:
    """Take a lock of a folder, or raise what :func:`locked` raises."""
    # It names the process that holds the lock. The file of the lock itself is not written: where a file system has no
    # locks, its presence is the lock, and its content names the process that made it, without which no other can
    # replace it.
    owner = folder / f"{lock}.owner"
    held = FileLock(folder / f"{lock}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire(blocking=False)
        owner.write_text(f"{os.getpid()} {socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        raise RunError(
            RunErrorCode.FOLDER_IN_USE,
            f"another run{_owner(owner)} writes into {folder}",
            help="wait for it or stop it, or choose another --out",
        ) from None
    except OSError as error:
        raise not_writable(f"--out {folder}: nothing can be written there", error, "choose another --out") from error
    return held


def _owner(file: Path) -> str:
    try:
        pid, host = file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return ""
    return f" (process {pid} on {host})"
