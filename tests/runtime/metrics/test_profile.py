"""One step of a run under torch's profiler."""

from __future__ import annotations

import contextlib
import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from legoai.runtime import RunOptions
from legoai.runtime.device import Device
from legoai.runtime.metrics.profile import profiled, write_trace
from support.training import corpus, programs

data, own_cache = corpus.data, corpus.own_cache


def fit(**options: Any) -> list[float]:
    trainer = programs.trainer(dtype=torch.float32, dp_shard=torch.distributed.get_world_size())
    history = trainer.fit(RunOptions(device="cpu", log_every=0, **options))
    return [record.loss for record in history.steps]


def fit_reporting(**options: Any) -> tuple[list[float], list[str]]:
    """The losses, and what this rank writes to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        losses = fit(**options)
    return losses, stream.getvalue().splitlines()


def operators(path: Path) -> list[str]:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "cpu_op"]


def test_profiling_one_step_changes_no_number(gloo, data, tmp_path):
    pool, out = gloo(2), tmp_path / "run"
    losses = pool(fit, steps=3, data=data, out=out, profile_step=2)
    assert losses == pool(fit, steps=3, data=data, out=tmp_path / "other")
    assert sorted(path.name for path in (out / "profile").iterdir()) == ["step-2-rank-0.json", "step-2-rank-1.json"]
    for path in (out / "profile").iterdir():
        names = operators(path)
        assert names.count("aten::embedding") == 2, "the micro batches of one step"
        assert any("all_gather" in name for name in names)
    assert not (tmp_path / "other" / "profile").exists()
    events = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert [event["step"] for event in events if event["event"] == "profile"] == [2]


def test_rank_that_cannot_write_its_trace_says_so_and_the_training_goes_on(gloo, data, tmp_path):
    pool, out = gloo(2), tmp_path / "run"
    trace = out / "profile" / "step-2-rank-1.json"
    trace.mkdir(parents=True)
    ranks = pool(fit_reporting, steps=3, data=data, out=out, profile_step=2)
    assert [losses for losses, _ in ranks] == pool(fit, steps=3, data=data, out=tmp_path / "other")
    assert sorted(path.name for path in trace.parent.iterdir()) == ["step-2-rank-0.json", trace.name]
    warning = f"warning: step 2 could not be profiled into {trace}: Is a directory; the training goes on"
    assert [warning in lines for _, lines in ranks] == [False, True]


def test_no_event_for_a_step_that_could_not_be_profiled(gloo, data, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "profile").touch()
    assert [len(losses) for losses in gloo(2)(fit, steps=3, data=data, out=out, profile_step=2)] == [3, 3]
    assert '"event": "profile"' not in (out / "metrics.jsonl").read_text(encoding="utf-8")


def test_trace_that_the_disk_does_not_take_leaves_no_draft(tmp_path):
    with profiled(Device(type="cpu")) as found:
        for _ in range(200):
            torch.ones(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_trace(found, tmp_path / "profile" / "step-2-rank-0.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "profile").iterdir()) == []
