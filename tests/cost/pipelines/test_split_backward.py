"""Pipelines that split their backward, simulated behind others in one process."""

from __future__ import annotations

from pathlib import Path

from legoai.cost import step
from legoai.cost.estimate import estimate
from support import simulated
from support.plans import lowered, manifest_of, resolved

SPLIT = """\
plan split
model     llama3("tiny")
cluster   h100_sxm(hosts = 1)
batch     (global = 16, micro = 1, seq_len = 64)
mesh      (pp = 2, dp_shard = 4)
pipeline  on pp (schedule = ZBVZeroBubble)
fsdp      blocks on dp_shard { layers.* = unit(reshard = after_backward) }
loss      fused
optimizer adamw(lr = 1e-3)
"""


def step_times(*texts: str) -> list[float]:
    """Seconds of the steps of plans, all simulated in this process."""
    step.may_fork = lambda: False
    found = []
    for text in texts:
        plan = resolved(text)
        found.append(estimate(lowered(text), plan, manifest_of(plan.model.source()), directory=Path()).step_time)
    return found


def test_a_compiled_loss_keeps_its_graph_for_the_second_half_whatever_was_simulated_before(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "together"))
    *_, behind = simulated.in_a_fork(step_times, SPLIT.replace("ZBVZeroBubble", "1F1B"), SPLIT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    assert [behind] == simulated.in_a_fork(step_times, SPLIT)
