"""One run at a time writes into a folder, and one that was killed does not keep it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.launching.lock import locked

KILLED = """
import errno, fcntl, os, sys
from pathlib import Path
from legoai.runtime.launching.lock import acquire

def without_locks(*_):
    raise OSError(errno.ENOSYS, "no locks")

if sys.argv[2] == "without locks":
    fcntl.flock = without_locks
held = acquire(Path(sys.argv[1]))
print("held", flush=True)
if sys.argv[3] == "dies":
    os._exit(9)
if os.fork() == 0:
    try:
        acquire(Path(sys.argv[1]))
    except Exception as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("system", ["with locks", "without locks"])
def test_killed_run_does_not_keep_its_folder(tmp_path, system):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path), system, "dies"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (9, "held\n"), done.stderr


@pytest.mark.parametrize("system", ["with locks", "without locks"])
def test_second_run_is_refused_and_told_the_first(tmp_path, system):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), system, "lives"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "another run (process " in done.stdout, done.stderr


def test_folder_that_was_removed_or_taken_by_another_run_is_reported(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    with locked(folder) as held:
        assert held.loss() is None
        folder.rename(moved)
        gone = held.loss()
        assert gone is not None and gone.code == RunErrorCode.FOLDER_GONE and str(folder) in gone.message
        with locked(folder):
            taken = held.loss()
            assert taken is not None and taken.code == RunErrorCode.FOLDER_IN_USE
            assert f"another run (process {os.getpid()} on " in taken.message
    with locked(moved) as held:
        (moved / "run.lock").unlink()
        assert held.loss() is not None


def test_lock_is_released(tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="another run"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
