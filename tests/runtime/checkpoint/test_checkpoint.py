"""A crash leaves the last good checkpoint, and a damaged one is skipped."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from legoai.runtime import durable
from legoai.runtime.checkpoint import folder as checkpoint_folder
from legoai.runtime.checkpoint.checkpoint import checksum, load, saved_names, verified_meta
from legoai.runtime.checkpoint.folder import Checkpoints
from legoai.runtime.errors import RunError, RunErrorCode
from support.training.checkpoints import (
    SIZE,
    edit_meta,
    flip_a_byte,
    loaded,
    meta,
    names,
    newest,
    resume,
    save,
    truncate,
)


def test_saved_state_is_loaded(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1, 2)
    assert gloo(1)(newest, tmp_path) == [(2, [])]
    assert gloo(1)(loaded, tmp_path / "step-2") == [2.0]
    assert gloo(1)(verified_meta, tmp_path / "step-1")[0].samples == 8


def test_only_the_newest_checkpoints_are_kept(gloo, tmp_path):
    gloo(1)(save, tmp_path, 8, 9, 10, 11, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11"]


def test_resuming_removes_what_is_beyond_keep(gloo, tmp_path):
    pool, steps = gloo(1), (6, 7, 8, 9)
    pool(save, tmp_path, *steps)
    assert pool(resume, tmp_path, 0) == pool(resume, tmp_path, 4) == [["step-6", "step-7", "step-8", "step-9"]]
    assert pool(resume, tmp_path, 3) == [["step-7", "step-8", "step-9"]]
    truncate(tmp_path / "step-8")
    assert pool(resume, tmp_path, 2) == [["step-7", "step-8", "step-9"]], "a damaged one does not count"
    truncate(tmp_path / "step-9")
    assert pool(resume, tmp_path, 1) == [["step-7", "step-8", "step-9"]], "newer ones stay until the next is saved"


def test_resuming_an_older_checkpoint_keeps_it(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1, 2, 3)
    assert gloo(1)(resume, tmp_path, 1, "step-2") == [["step-2", "step-3"]]
    assert gloo(1)(resume, tmp_path, 1, "../elsewhere/step-9") == [["step-2", "step-3"]]


def save_where_nothing_is_removed(root: Path) -> None:
    def fail(self: Checkpoints, point: object) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="step-8 cannot be removed"):
        patch.setattr(Checkpoints, "_remove", fail)
        save(root, 8, 9, keep=1)


def test_checkpoint_that_cannot_be_removed_does_not_end_the_run(gloo, tmp_path):
    gloo(1)(save_where_nothing_is_removed, tmp_path)
    assert gloo(1)(newest, tmp_path) == [(9, [])]


def test_damaged_checkpoint_does_not_count_as_kept(gloo, tmp_path):
    gloo(1)(save, tmp_path, 4, 6)
    truncate(tmp_path / "step-6")
    gloo(1)(save, tmp_path, 7, keep=2)
    assert names(tmp_path) == ["step-4", "step-6", "step-7"]
    gloo(1)(save, tmp_path, 8, keep=2)
    assert names(tmp_path) == ["step-7", "step-8"]


def test_newer_damaged_checkpoint_does_not_remove_good_ones(gloo, tmp_path):
    gloo(1)(save, tmp_path, 4, 6)
    truncate(tmp_path / "step-6")
    gloo(1)(save, tmp_path, 5, keep=1)
    [(step, [warning])] = gloo(1)(newest, tmp_path)
    assert step == 5 and "step-6 is skipped" in warning


def save_while_they_are_damaged(root: Path) -> None:
    checkpoints = Checkpoints(root, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save({"model.w": torch.full((SIZE,), float(step))}, meta(step))
        if step == 3:
            flip_a_byte(root / "step-3" / "__0_0.distcp")


def test_damage_after_verification_is_detected(gloo, tmp_path):
    gloo(1)(save_while_they_are_damaged, tmp_path)
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]


def save_on_a_disk_that_loses_a_bit(root: Path) -> None:
    def publish(self, draft, final, meta, files):
        whole(self, draft, final, meta, files)
        flip_a_byte(final / "__0_0.distcp")

    whole, Checkpoints._publish = Checkpoints._publish, publish
    try:
        save(root, 3, keep=1)
    finally:
        Checkpoints._publish = whole


def test_older_checkpoints_are_removed_only_after_verification(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1, 2)
    with pytest.raises(RunError, match=r"step-3 was written, but cannot be read back: .*checksum") as caught:
        gloo(1)(save_on_a_disk_that_loses_a_bit, tmp_path)
    assert caught.value.code == RunErrorCode.CHECKPOINT_NOT_WRITTEN
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]
    assert gloo(1)(newest, tmp_path)[0][0] == 2


def save_where_a_folder_cannot_be_listed(root: Path, name: str) -> None:
    """Save steps 1 to 3, keeping two, on a disk that does not list one of the folders again."""
    listed, checkpoints = Path.iterdir, Checkpoints(root, keep=2)

    def entries(path: Path) -> Iterator[Path]:
        if path == root / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listed(path)

    with pytest.MonkeyPatch.context() as patch:
        for step in (1, 2, 3):
            if step == 3:
                patch.setattr(Path, "iterdir", entries)
            checkpoints.save({"model.w": torch.full((SIZE,), float(step))}, meta(step))


def test_older_checkpoints_that_cannot_be_listed_do_not_end_the_run(gloo, tmp_path):
    gloo(2)(save_where_a_folder_cannot_be_listed, tmp_path, "step-2")
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_damage_of_all_checkpoints_is_an_error(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1, 2)
    for step in (1, 2):
        truncate(tmp_path / f"step-{step}")
    with pytest.raises(RunError, match=r"each of the 2 checkpoints .* is damaged; of the newest: .*step-2.*100 bytes"):
        gloo(1)(newest, tmp_path)


def swept(root: Path) -> None:
    Checkpoints(root).sweep()


def test_incomplete_checkpoints_of_a_crash_are_removed(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1)
    for name in ("step-2.tmp", "step-7-branch-1.tmp"):
        (tmp_path / name / "deep").mkdir(parents=True)
    gloo(1)(swept, tmp_path)
    assert names(tmp_path) == ["step-1"]
    gloo(1)(swept, tmp_path / "nothing")


def test_foreign_files_beside_checkpoints_stay(gloo, tmp_path):
    gloo(1)(save, tmp_path / "run", 1)
    foreign = ["step-9.tmp", "step-8.tmp", "step-by-step.tmp"]
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "run" / foreign[0]).write_text("x")
    (tmp_path / "run" / foreign[1]).symlink_to(tmp_path / "other")
    (tmp_path / "run" / foreign[2]).mkdir()
    gloo(1)(swept, tmp_path / "run")
    assert names(tmp_path / "run") == sorted([*foreign, "step-1"])
    gloo(1)(save, tmp_path / "run", 8, 9)
    assert gloo(1)(newest, tmp_path / "run") == [(9, [])] and (tmp_path / "other" / "deep").is_dir()


def test_file_in_the_place_of_the_folder_is_refused(gloo, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(RunError, match=f"{name} is no folder") as caught:
            gloo(1)(swept, tmp_path / name)
        assert caught.value.code == RunErrorCode.FOLDER_NOT_WRITABLE and "--out" in caught.value.help


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root mounts file systems")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def save_large(root: Path) -> None:
    Checkpoints(root).save({"model.w": torch.zeros(1 << 20)}, meta(2))


def test_keeping_fewer_is_advised_where_that_makes_room(gloo, small_disk):
    gloo(1)(save, small_disk, 1)
    with pytest.raises(RunError, match="full") as caught:
        gloo(1)(save_large, small_disk)
    assert "--keep" not in caught.value.help
    gloo(1)(save, small_disk, 2)
    with pytest.raises(RunError, match="full") as caught:
        gloo(1)(save_large, small_disk)
    assert "free space, keep fewer with --keep, or choose another --out" in caught.value.help


def save_under_a_limit_of_files(root: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        save_large(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_limit_of_file_sizes_is_named(gloo, tmp_path):
    with pytest.raises(
        RunError, match=r"step-2 could not be written: a file may not be as large .* 4\.0 MiB"
    ) as caught:
        gloo(1)(save_under_a_limit_of_files, tmp_path)
    assert "ulimit -f" in caught.value.help and names(tmp_path) == []


def test_full_disk_is_reported_and_space_released(gloo, small_disk):
    gloo(1)(save, small_disk, 1)
    with pytest.raises(RunError, match=r"step-2 could not be written: the disk is full.* about 4\.0 MiB") as caught:
        gloo(1)(save_large, small_disk)
    assert caught.value.code == RunErrorCode.CHECKPOINT_NOT_WRITTEN
    assert names(small_disk) == ["step-1"]
    assert gloo(1)(newest, small_disk) == [(1, [])]


def save_with_a_file_of_another_host(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "on_every_rank", lambda function: [function(), {"__1_0.distcp": (10, 0)}])
        patch.setattr(checkpoint_folder, "_LATE_SECONDS", 0.0)
        save(root, 2)


def test_storage_that_ranks_do_not_share_is_reported_at_once(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1)
    with pytest.raises(RunError, match=r"step-2 could not be written: __1_0.distcp, which another rank wrote"):
        gloo(1)(save_with_a_file_of_another_host, tmp_path)
    assert gloo(1)(newest, tmp_path) == [(1, [])]


def test_torch_can_read_a_checkpoint(gloo, tmp_path):
    gloo(1)(save, tmp_path, 3)
    state = {"model.w": torch.zeros(SIZE)}
    dcp.load(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert float(state["model.w"][-1]) == 3.0


def save_and_crash(root: Path, at: str) -> None:
    """Save step 2 while a part of the saving fails."""

    def crash(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch.object(durable if at == "sync" else checkpoint_folder, at, crash):
        save(root, 2)


@pytest.mark.parametrize("at", ["_make_draft", "_checksums", "write_durably", "sync"])
def test_crash_while_saving_keeps_the_last_good_checkpoint(gloo, tmp_path, at):
    gloo(1)(save, tmp_path, 1)
    with pytest.raises(RunError, match=r"step-2 could not be written: the disk is full"):
        gloo(1)(save_and_crash, tmp_path, at)
    assert gloo(1)(newest, tmp_path) == [(1, [])]
    gloo(1)(save, tmp_path, 2)
    assert gloo(1)(newest, tmp_path) == [(2, [])]


def test_checkpoints_of_earlier_versions_are_read(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1)
    edit_meta(tmp_path / "step-1", digested=False)
    (tmp_path / "step-1" / "meta.sha256").unlink()
    assert gloo(1)(newest, tmp_path) == [(1, [])]


def test_earlier_versions_read_a_checkpoint(gloo, tmp_path):
    """They refuse fields that they do not know, and check the size and the CRC-32 of each file."""
    gloo(1)(save, tmp_path, 1)
    fields = json.loads((tmp_path / "step-1" / "meta.json").read_text())
    known = "step plan plan_hash model seed samples corpus world torch optimizer seq_len format files"
    assert list(fields) == known.split()
    for name, entry in fields["files"].items():
        file = tmp_path / "step-1" / name
        assert entry == [file.stat().st_size, checksum(file)]


def test_a_copy_of_a_checkpoint_may_have_any_name(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "best")
    assert gloo(1)(verified_meta, tmp_path / "best")[0].step == 1


def newest_while_unreadable(root: Path, name: str) -> tuple[int | None, list[str]]:
    """The newest checkpoint where a file of step 2 cannot be read, on the rank that reads it."""
    opened = Path.open

    def open_file(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == root / "step-2" / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_file)
        return newest(root)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.json"])
def test_unreadable_file_is_damage_on_every_rank(gloo, tmp_path, name):
    gloo(1)(save, tmp_path, 1, 2)
    [(step, [warning]), (other, [])] = gloo(2)(newest_while_unreadable, tmp_path, name)
    assert step == other == 1
    assert "step-2 is skipped" in warning and f"{name} cannot be read: " in warning and "Input/output" in warning


@pytest.mark.parametrize("use", [saved_names, loaded])
def test_missing_metadata_of_a_verified_checkpoint_is_damage(gloo, tmp_path, use):
    gloo(1)(save, tmp_path, 1)
    (tmp_path / "step-1" / ".metadata").unlink()
    with pytest.raises(RunError, match=r"step-1: \.metadata cannot be read: No such file") as caught:
        gloo(1)(use, tmp_path / "step-1")
    assert caught.value.code == RunErrorCode.CHECKPOINT_CORRUPT


def test_temporary_folder_is_not_a_checkpoint(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-9.tmp")
    assert gloo(1)(newest, tmp_path) == [(None, [])]


def test_partial_load_skips_other_tensors(gloo, tmp_path):
    gloo(1)(save, tmp_path, 5)
    assert gloo(1)(load_part, tmp_path / "step-5") == [(5.0, 7.0, 1.0, ["model.other", "optimizer.other.exp_avg"])]


def load_part(path: Path) -> tuple[float, float, float, list[str]]:
    state = {
        "model.w": torch.zeros(SIZE),
        "model.other": torch.full((2,), 7.0),
        "optimizer.other.exp_avg": torch.ones(2),
    }
    left_out = load(path, state, other_model=True)
    first = [float(tensor[0]) for tensor in state.values()]
    return first[0], first[1], first[2], left_out
