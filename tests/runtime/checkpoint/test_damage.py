"""Damaged checkpoints are skipped, and those of newer versions stop a run and stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legoai.runtime.checkpoint.checkpoint import verified_meta
from legoai.runtime.errors import RunError, RunErrorCode
from support.training.checkpoints import edit_meta, flip_a_byte, names, newest, record, save


def nested(levels: int) -> list[object]:
    found: list[object] = []
    for _ in range(levels):
        found = [found]
    return found


DAMAGES = {
    "meta.json is missing": lambda path: (path / "meta.json").unlink(),
    "meta.json is cut short": lambda path: os.truncate(path / "meta.json", 20),
    "meta.json is of another kind": lambda path: (path / "meta.json").write_text('{"format": 1, "files": {}}'),
    "meta.json is a list": lambda path: (path / "meta.json").write_text("[]"),
    "meta.json is nested too deeply": lambda path: (path / "meta.json").write_text("[" * 100_000),
    "meta.json is nested deeply": lambda path: edit_meta(path, digested=False, corpus=nested(200)),
    "meta.json is a folder": lambda path: ((path / "meta.json").unlink(), (path / "meta.json").mkdir()),
    "the format is a text": lambda path: edit_meta(path, digested=False, format="99"),
    "the format is of nothing": lambda path: edit_meta(path, digested=False, format=0),
    "the files have no sizes": lambda path: edit_meta(path, digested=True, files={".metadata": None}),
    "meta.json has another data position": lambda path: edit_meta(path, digested=True, samples=17),
    "meta.json has no digest": lambda path: (path / "meta.sha256").unlink(),
    "the digest is of another file": lambda path: flip_a_byte(path / "meta.sha256"),
    "the step is a text": lambda path: edit_meta(path, digested=False, step="2"),
    "the data position is a truth value": lambda path: edit_meta(path, digested=False, samples=True),
    "the data position is negative": lambda path: edit_meta(path, digested=False, samples=-16),
    "the data position is beyond 64 bits": lambda path: edit_meta(path, digested=False, samples=10**30),
    "the length is negative": lambda path: edit_meta(path, digested=False, seq_len=-64),
    "there were no ranks": lambda path: edit_meta(path, digested=False, world=0),
    "the length is a fraction": lambda path: edit_meta(path, digested=False, seq_len=0.5),
    "the step is of another folder": lambda path: edit_meta(path, digested=False, step=7),
    "details are missing": lambda path: (path / "details.json").unlink(),
    "details are cut short": lambda path: os.truncate(path / "details.json", 20),
    "a bit of the details flipped": lambda path: flip_a_byte(path / "details.json"),
    "details are a list": lambda path: (path / "details.json").write_text("[]"),
    "whether it was updated is a number": lambda path: (path / "details.json").write_text('{"updated": 1}'),
    "data is missing": lambda path: (path / "__0_0.distcp").unlink(),
    "data is cut short": lambda path: os.truncate(path / "__0_0.distcp", 100),
    "a bit of the data flipped": lambda path: flip_a_byte(path / "__0_0.distcp"),
    "a bit of the metadata flipped": lambda path: flip_a_byte(path / ".metadata"),
    "metadata is missing": lambda path: (path / ".metadata").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_warning(gloo, tmp_path, damage):
    gloo(1)(save, tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    [(step, [warning])] = gloo(1)(newest, tmp_path)
    assert step == 1 and "step-2 is skipped" in warning


@pytest.mark.parametrize("content", ["null", "[1]", '"x"', "", "[" * 100_000])
def test_details_that_are_no_object_are_named(gloo, tmp_path, content):
    gloo(1)(save, tmp_path, 1, 2)
    (tmp_path / "step-2" / "details.json").write_text(content)
    record(tmp_path / "step-2", "details.json")
    [(step, [warning])] = gloo(1)(newest, tmp_path)
    assert step == 1 and "step-2/details.json cannot be read: " in warning and "NoneType" not in warning


@pytest.mark.parametrize("step", [-4, 0, 10**25])
def test_step_that_no_training_has_is_damage(gloo, tmp_path, step):
    gloo(1)(save, tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "copy")
    edit_meta(tmp_path / "copy", digested=False, step=step)
    with pytest.raises(RunError, match=f"meta.json is damaged: step is {step}") as caught:
        gloo(1)(verified, tmp_path / "copy")
    assert caught.value.code == RunErrorCode.CHECKPOINT_CORRUPT and "another checkpoint" in caught.value.help


def verified(path: Path) -> int:
    return verified_meta(path).step


NEWER = {
    "its format": lambda path: edit_meta(path, digested=True, format=99),
    "little that is known": lambda path: (path / "meta.json").write_text('{"format": 99}'),
    "a field": lambda path: edit_meta(path, digested=False, cursor=[1], zeal={}),
}


@pytest.mark.parametrize("made", NEWER.values(), ids=NEWER)
def test_checkpoint_of_a_newer_version_stops_the_run_and_stays(gloo, tmp_path, made):
    gloo(1)(save, tmp_path, 1, 2)
    made(tmp_path / "step-2")
    meta = (tmp_path / "step-2" / "meta.json").read_text()
    for use, arguments in ((newest, []), (save, [2]), (newest, [])):
        with pytest.raises(RunError, match="step-2 was written by a newer LegoAI: ") as caught:
            gloo(1)(use, tmp_path, *arguments)
        assert caught.value.code == RunErrorCode.CHECKPOINT_NEWER
        assert caught.value.help.startswith("upgrade LegoAI, or choose another --out")
    assert (tmp_path / "step-2" / "meta.json").read_text() == meta and names(tmp_path) == ["step-1", "step-2"]
    if "format" not in caught.value.message:
        assert caught.value.message.endswith("meta.json has what this version does not know: cursor, zeal")


def test_checkpoint_of_a_newer_version_is_not_removed(gloo, tmp_path):
    gloo(1)(save, tmp_path, 1, 2, 3)
    edit_meta(tmp_path / "step-2", digested=True, format=2)
    gloo(1)(save, tmp_path, 4, 5, keep=2)
    assert names(tmp_path) == ["step-2", "step-4", "step-5"]
