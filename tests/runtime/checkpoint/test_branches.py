"""A branch begins where a run resumes an older checkpoint, and its history is kept before that which it left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from legoai.runtime.checkpoint.folder import Checkpoints
from legoai.runtime.errors import RunError
from support.training.checkpoints import SIZE, meta, names, newest, resume, truncate


def branch_off(root: Path, path: Path | None, step: int, damaged: bool = False) -> tuple[bool, str]:
    checkpoints = Checkpoints(root)
    begun = checkpoints.choose_branch(path, newer_are_damaged=damaged)
    return begun, checkpoints.save({"model.w": torch.full((SIZE,), float(step))}, meta(step)).name


def test_resuming_an_older_checkpoint_starts_a_branch(gloo, tmp_path):
    root, [pool] = tmp_path / "run", [gloo(1)]
    assert pool(branch_off, root, None, 2) == [(False, "step-2")]
    assert pool(branch_off, root, root / "step-2", 4) == [(False, "step-4")]
    assert pool(branch_off, root, root / "step-2", 3) == [(True, "step-3-branch-1")]
    assert pool(newest, root) == [(3, [])]
    assert pool(branch_off, root, root / "step-3-branch-1", 5) == [(False, "step-5-branch-1")]
    assert pool(branch_off, root, root / "step-3-branch-1", 4) == [(True, "step-4-branch-2")]
    assert pool(branch_off, root, tmp_path / "other" / "step-9", 10) == [(True, "step-10-branch-3")]
    truncate(root / "step-10-branch-3")
    damaged = pool(branch_off, root, root / "step-4-branch-2", 5, True)
    assert damaged == [(True, "step-5-branch-4")], "as it is not of the history that was followed"
    assert pool(newest, root) == [(5, [])]


def save_on(root: Path, path: Path | None, *steps: int) -> None:
    checkpoints = Checkpoints(root, keep=3)
    checkpoints.choose_branch(path)
    for step in steps:
        checkpoints.save({"model.w": torch.full((SIZE,), float(step))}, meta(step))


def test_abandoned_checkpoints_are_removed_before_the_history_of_a_branch(gloo, tmp_path):
    root, pool = tmp_path / "run", gloo(1)
    pool(save_on, root, None, 54, 57, 60)
    pool(save_on, root, root / "step-54", 57)
    assert names(root) == ["step-54", "step-57-branch-1", "step-60"]
    assert pool(resume, root, 2) == [["step-54", "step-57-branch-1"]], "the abandoned one goes at once"
    truncate(root / "step-57-branch-1")
    assert pool(newest, root)[0][0] == 54
    pool(save_on, root, root / "step-57-branch-1", 60, 63, 66)
    assert names(root) == ["step-60-branch-1", "step-63-branch-1", "step-66-branch-1"]


def test_return_to_an_abandoned_history_is_reported_and_recorded(gloo, tmp_path):
    root, pool = tmp_path / "run", gloo(1)
    pool(save_on, root, None, 3, 6)
    pool(save_on, root, tmp_path / "other" / "step-2", 5)
    truncate(root / "step-5-branch-1")
    [(step, [damaged, gone, left])] = pool(newest, root)
    assert step == 6 and "step-5-branch-1 is skipped" in damaged and "other/step-2 is skipped: it is gone" in gone
    assert f"{root}/step-6 is of a history that the run had left" in left
    assert pool(branch_off, root, root / "step-6", 7, True) == [(True, "step-7-branch-2")]
    assert pool(newest, root) == [(7, [])], "what was begun from elsewhere is followed no more"


@pytest.mark.parametrize("own", [[], [3], [3, 6]])
def test_checkpoint_elsewhere_that_is_gone_is_named(gloo, tmp_path, own):
    root, pool = tmp_path / "run" / "checkpoints", gloo(1)
    pool(begin_elsewhere, root, tmp_path / "other" / "step-2", *own)
    for step in own:
        truncate(root / f"step-{step}")
    with pytest.raises(RunError) as caught:
        pool(newest, root)
    said = (
        f"the checkpoint from which the run in {root.parent} began, {tmp_path}/other/step-2, cannot be read: it is gone"
    )
    many = {0: "", 1: "the only checkpoint", 2: "each of the 2 checkpoints"}[len(own)]
    assert caught.value.message.endswith(said) and caught.value.message.startswith(f"{many} in {root}" if own else said)
    assert "--resume" in caught.value.help and "--restart" in caught.value.help


def begin_elsewhere(root: Path, path: Path, *steps: int) -> None:
    checkpoints = Checkpoints(root)
    checkpoints.choose_branch(path, asked=str(path))
    for step in steps:
        checkpoints.save({"model.w": torch.full((SIZE,), float(step))}, meta(step))


DAMAGED = {
    "cut short": '{"begin',
    "no object": "[]",
    "nested too deeply": "[" * 100_000,
    "no beginnings": '{"beginnings": null}',
    "a list of beginnings": '{"beginnings": [1]}',
    "a text as beginnings": '{"beginnings": "x"}',
    "a branch without number": '{"beginnings": {"x": "step-1"}}',
    "a branch of another script": '{"beginnings": {"\u00b2": "step-1"}}',
    "a negative branch": '{"beginnings": {"-3": "step-1"}}',
    "a branch far away": '{"beginnings": {"99999999999999999999": "step-1"}}',
    "a number as beginning": '{"beginnings": {"1": 5}}',
    "a zero byte": '{"beginnings": {"1": "a\\u0000b"}}',
    "half a surrogate pair": '{"beginnings": {"1": "\\ud800"}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_record_of_branches_is_ignored_with_a_warning(gloo, tmp_path, content):
    root, pool = tmp_path / "run" / "checkpoints", gloo(1)
    pool(save_on, root, None, 1, 2)
    (root.parent / "branches.json").write_text(content, encoding="utf-8")
    [(step, [warning])] = pool(newest, root)
    assert step == 2 and f"{root.parent}/branches.json is damaged: " in warning and "it is ignored" in warning
    assert pool(branch_off, root, root / "step-1", 3) == [(True, "step-3-branch-1")]
    assert pool(newest, root) == [(3, [])], "the record is written anew"


def test_record_of_branches_that_cannot_be_read_is_ignored_with_a_warning(gloo, tmp_path):
    root, pool = tmp_path / "run" / "checkpoints", gloo(1)
    pool(save_on, root, None, 1)
    (root.parent / "branches.json").mkdir()
    [(step, [warning])] = pool(newest, root)
    assert step == 1 and "branches.json cannot be read: Is a directory" in warning


@pytest.mark.parametrize("place", ["x" * 300, "/nowhere/step-1", "circle"])
def test_beginning_that_cannot_be_is_gone(gloo, tmp_path, place):
    root, pool = tmp_path / "run" / "checkpoints", gloo(1)
    pool(save_on, root, None, 1)
    (root / "circle").symlink_to(root / "circle")
    (root.parent / "branches.json").write_text(json.dumps({"beginnings": {"1": place}}), encoding="utf-8")
    [(step, [gone, left])] = pool(newest, root)
    assert step == 1 and "is skipped: it is gone" in gone and "step-1 is of a history" in left
