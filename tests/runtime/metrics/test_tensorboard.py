"""Figures for TensorBoard, of new and resumed runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from legoai.runtime.errors import RunError
from legoai.runtime.metrics.tensorboard import TensorBoard, check_installed
from support.texts.plans import HEAD, lowered
from support.training import corpus
from support.training.staged import train

data, own_cache = corpus.data, corpus.own_cache

PLAN = f"""{HEAD}
batch     (global = 8, micro = 2, seq_len = 32)
optimizer adamw(lr = 1e-2)
clip      (norm = 1.0)
mesh      (dp_shard = 2)
fsdp on dp_shard {{ layers.* = unit, root = unit }}
"""


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars as TensorBoard reads them, by title."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(item.step, item.value) for item in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.slow
def test_step_and_validation_figures_are_written_once(gloo, data, tmp_path):
    pytest.importorskip("tensorboard")
    text = lowered(PLAN).text
    options = {"out": tmp_path, "tensorboard": True, "evaluate_every": 2, "evaluate_batches": 1, "save_every": 1}
    first = gloo(2)(train, text, data, steps=3, keep=0, **options)[0]
    again = gloo(2)(train, text, data, steps=4, resume=str(tmp_path / "checkpoints" / "step-1"), **options)[0]
    assert again["resumed_from"] == 1
    found = scalars(tmp_path / "tensorboard")
    expected = [first["loss"][0], *again["loss"]]
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4]
    assert [value for _, value in found["loss"]] == pytest.approx(expected, rel=1e-6)
    assert [value for _, value in found["gradient/norm"]] == pytest.approx([first["norm"][0], *again["norm"]], rel=1e-6)
    assert found["loss of validation"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in again["validations"]]
    assert all(value > 0 for _, value in found["speed/tokens per second and device"])
    assert {"learning rate", "speed/seconds of a step", "memory/peak bytes of rank 0"} <= found.keys()


def test_resumed_run_that_begins_with_a_validation_keeps_the_figures_of_its_step(tmp_path):
    pytest.importorskip("tensorboard")
    first, again = TensorBoard(tmp_path), TensorBoard(tmp_path)
    for step in range(1, 6):
        first.step({"step": step, "loss": float(step)})
    first.close()
    again.event("resume", {"step": 4})
    again.event("validation", {"step": 4, "loss": 9.0})
    again.step({"step": 5, "loss": 50.0})
    again.close()
    found = scalars(tmp_path)
    assert found["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    assert found["loss of validation"] == [(4, 9.0)]


def test_missing_package_is_an_error_with_a_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match=r"RUN051") as raised:
        check_installed()
    assert "legoai[tensorboard]" in raised.value.help
