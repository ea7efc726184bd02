"""An interrupted build's folder is removed by the next build, and a running one's is not."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legoai.runtime.data.building import building

KILLED = """
import os, sys
from pathlib import Path
from legoai.runtime.data.building import building

with building(Path(sys.argv[1])) as folder:
    (folder / "draft").write_text("half")
    os._exit(9)
"""


def folders(place: Path) -> list[Path]:
    return sorted(place.glob("building-*"))


def test_builds_beside_each_other_keep_their_folders(tmp_path: Path):
    with building(tmp_path) as one, building(tmp_path) as other:
        assert folders(tmp_path) == sorted((one, other)) and one != other
    assert folders(tmp_path) == []


def test_folder_of_a_killed_build_is_removed_by_the_next(tmp_path: Path):
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=60, check=False).returncode == 9
    [left] = folders(tmp_path)
    assert (left / "draft").exists()
    with building(tmp_path) as folder:
        assert folders(tmp_path) == [folder]


def test_folder_without_a_lock_is_removed_when_nothing_in_it_changed_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    (tmp_path / "building-old").mkdir()
    draft = tmp_path / "building-old" / "draft"
    draft.touch()
    os.utime(draft.parent, times=(0, 0))
    with building(tmp_path) as one, building(tmp_path) as other:
        assert folders(tmp_path) == sorted((one, other, draft.parent)), "it is written into"
    os.utime(draft, times=(0, time.time() - 25 * 3600))
    with building(tmp_path) as one:
        assert folders(tmp_path) == [one]
