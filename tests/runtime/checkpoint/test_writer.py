"""Asynchronous checkpoints equal synchronous ones."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from legoai.runtime import RunError, RunErrorCode, RunOptions, Trainer
from legoai.runtime.checkpoint import folder as checkpoint_folder
from legoai.runtime.checkpoint.checkpoint import load, training_state, verified_meta
from legoai.runtime.device import Device
from support.training import corpus, programs

data, own_cache = corpus.data, corpus.own_cache

SECONDS = 60.0
"""For which something that must happen is waited for."""


def trainer() -> Trainer:
    """The parameters of the model in shards of all ranks."""
    return programs.trainer(dtype=torch.float32, dp_shard=dist.get_world_size())


def fit(**options: Any) -> list[float]:
    """The losses of a run."""
    history = trainer().fit(RunOptions(device="cpu", log_every=0, **options))
    return [record.loss for record in history.steps]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Contents of a checkpoint, in the shards of this rank."""
    training = trainer().prepare(Device(type="cpu"), seed=1)
    state = training_state(training.model, training.optimizer)
    load(path, state)
    return {name: (value.to_local() if hasattr(value, "to_local") else value).clone() for name, value in state.items()}


def saved(out: Path) -> list[dict[str, Any]]:
    """Checkpoint events of a run."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "checkpoint"]


def test_asynchronous_checkpoint_equals_a_synchronous_one(gloo, data, tmp_path):
    pool, kinds = gloo(2), {"waited": False, "beside": True}
    losses = {
        name: pool(fit, steps=2, data=data, out=tmp_path / name, save_every=1, save_async=kind, keep=0)
        for name, kind in kinds.items()
    }
    assert losses["beside"] == losses["waited"]
    for step in (1, 2):
        one, other = (pool(tensors, tmp_path / name / "checkpoints" / f"step-{step}") for name in kinds)
        for mine, theirs in zip(one, other, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    events = saved(tmp_path / "beside")
    assert [event["step"] for event in events] == [1, 2]
    assert all(0.0 < event["waited"] < event["seconds"] for event in events)
    assert pool(verified_meta, tmp_path / "beside" / "checkpoints" / "step-2")[0].samples > 0
    assert pool(fit, steps=3, data=data, out=tmp_path / "beside") == pool(
        fit, steps=3, data=data, out=tmp_path / "waited"
    )


def goes_on(**options: Any) -> bool:
    """Write only once the training has come to the next step, and return whether it had."""
    taken, whole, seen = threading.Event(), checkpoint_folder.save_distributed, list[bool]()

    def late(*args: Any, **kwargs: Any) -> object:
        seen.append(taken.wait(SECONDS))
        return whole(*args, **kwargs)

    steps: list[None] = []

    def step(_: object) -> None:
        steps.append(None)
        if len(steps) > 1:
            taken.set()

    checkpoint_folder.save_distributed = late  # type: ignore[assignment]
    try:
        trainer().fit(RunOptions(device="cpu", log_every=0, **options), observe=step)
    finally:
        checkpoint_folder.save_distributed = whole
    return all(seen)


def test_training_continues_during_an_asynchronous_save(gloo, data, tmp_path):
    found = gloo(2)(goes_on, steps=3, data=data, out=tmp_path / "run", save_every=1, save_async=True)
    assert found == [True, True]


def recorded_by_step(out: Path, **options: Any) -> list[list[int]]:
    """The checkpoints that the metrics hold at each step of a run, whose steps wait for a pending checkpoint."""
    seen: list[list[int]] = []

    def step(_: object) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(SECONDS)
        seen.append([event["step"] for event in saved(out)])

    trainer().fit(RunOptions(device="cpu", log_every=0, out=out, **options), observe=step)
    return seen


def test_asynchronous_checkpoint_is_recorded_when_it_is_complete(gloo, data, tmp_path):
    [found, _] = gloo(2)(recorded_by_step, tmp_path / "run", steps=6, data=data, save_every=2, save_async=True)
    assert found == [[], [], [], [2], [2], [2, 4]]
    assert [event["step"] for event in saved(tmp_path / "run")] == [2, 4, 6]


def fails_at_the_second(**options: Any) -> None:
    whole, calls = checkpoint_folder.save_distributed, list[None]()

    def full(*args: Any, **kwargs: Any) -> object:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return whole(*args, **kwargs)

    checkpoint_folder.save_distributed = full  # type: ignore[assignment]
    try:
        fit(**options)
    finally:
        checkpoint_folder.save_distributed = whole


def test_failed_asynchronous_save_stops_the_run_at_the_next(gloo, data, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(RunError, match="step-4 could not be written: the disk is full") as raised:
        gloo(1)(fails_at_the_second, steps=20, data=data, out=out, save_every=2, save_async=True)
    assert raised.value.code == RunErrorCode.CHECKPOINT_NOT_WRITTEN
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-2"]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(event["step"] for event in steps if event["event"] == "step") == 6
    assert len(gloo(1)(fit, steps=20, data=data, out=out)[0]) == 18


def not_a_number(**options: Any) -> None:
    def spoil(training: Any) -> None:
        if len(seen) == 2:
            next(training.model.parameters()).data.fill_(float("nan"))
        seen.append(None)

    seen: list[None] = []
    trainer().fit(RunOptions(device="cpu", log_every=0, **options), observe=spoil)


def test_pending_save_is_finished_when_training_fails(gloo, data, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(RunError, match="not made"):
        gloo(2)(not_a_number, steps=9, data=data, out=out, save_every=3, save_async=True)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-3"]
