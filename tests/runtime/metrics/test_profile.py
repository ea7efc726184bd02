"""One step of a run under torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from legoai.runtime import RunOptions
from support import corpus, programs

data, own_cache = corpus.data, corpus.own_cache


def fit(**options: Any) -> list[float]:
    trainer = programs.trainer(dtype=torch.float32, dp_shard=torch.distributed.get_world_size())
    history = trainer.fit(RunOptions(device="cpu", log_every=0, **options))
    return [record.loss for record in history.steps]


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
