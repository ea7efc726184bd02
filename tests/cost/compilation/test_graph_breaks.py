"""Compiled modules whose graph breaks: their parts without a break are compiled, and the rest runs as it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from legoai.cost.compilation.modules import has_graph_break, parts_of
from legoai.cost.estimate import estimate
from legoai.cost.trace.records import Collective, Kernel
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.runtime.parallelism.experts import limit_capacity
from support.simulation.simulated import in_a_fork

PLAN = """plan experts
model   mixtral("tiny")
cluster h100_sxm(devices = 4)
batch   (global = 16, micro = 2, seq_len = 64)
mesh    (dp_shard = 4, ep = 2)
shard standard on ep
fsdp blocks on dp_shard
"""
BROKEN = "compile { layers.* = inductor(fullgraph = false) }\n"


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.attention = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.moe = nn.ModuleDict({"router": nn.Linear(4, 2), "experts": Experts()})


def test_parts_are_the_largest_modules_without_a_break():
    block = Block()
    assert not has_graph_break(block)
    limit_capacity(block.moe["experts"], capacity_factor=1.0)
    assert has_graph_break(block)
    names = {module: path for path, module in block.named_modules()}
    assert [names[part] for part in parts_of(block)] == ["norms.0", "norms.1", "attention", "moe.router"]
    assert list(parts_of(block.moe["experts"])) == []


@dataclass(frozen=True)
class Costed:
    """Figures of an estimate, and what the last step of its rank records."""

    step_time: float
    peak: int
    assumptions: tuple[str, ...]
    kernels: Counter[tuple[str, str]]
    collectives: Counter[tuple[str, int]]

    def of(self, part: str) -> Counter[str]:
        """The kernels of modules whose paths contain a word."""
        return Counter({op: count for (module, op), count in self.kernels.items() if part in module})


def _costed(text: str) -> Costed:
    linted = lint(text, "a.plan", directory=Path())
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    analysis = linted.analysis
    assert analysis is not None
    assert analysis.manifest is not None
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    [rank] = found.ranks
    records = rank.trace.between(rank.span)
    return Costed(
        found.step_time,
        found.peak_active,
        found.assumptions,
        Counter((item.module, item.op) for item in records if isinstance(item, Kernel)),
        Counter((item.kind, item.bytes) for item in records if isinstance(item, Collective)),
    )


def costed(text: str) -> Costed:
    return in_a_fork(_costed, text)


@pytest.fixture(scope="module")
def eager() -> Costed:
    return costed(PLAN)


@pytest.mark.slow
def test_compiled_blocks_with_experts_on_several_ranks_are_costed(eager: Costed):
    found = costed(PLAN + BROKEN)
    assert found.step_time < eager.step_time
    assert found.peak == pytest.approx(eager.peak, rel=0.01)  # the logits
    assert found.collectives == eager.collectives
    assert any(op.startswith("fused(") for op in found.of("attention_norm"))
    assert found.of("experts") == eager.of("experts")
    [told] = [item for item in found.assumptions if "operator by operator" in item]
    assert "`layers.0` breaks at `layers.0.feed_forward.experts`" in told
    assert not [item for item in eager.assumptions if "operator by operator" in item]


def test_compiled_experts_that_break_run_as_they_are(eager: Costed):
    found = costed(f"{PLAN}compile {{ **.experts = inductor(fullgraph = false) }}\n")
    assert found.kernels == eager.kernels
    assert found.step_time == pytest.approx(eager.step_time)


@pytest.mark.slow
def test_model_compiled_around_units_is_costed_as_its_units():
    plan = PLAN.replace("shard standard on ep\n", "").replace(", ep = 2", "")
    around = costed(f"{plan}compile {{ root = inductor(fullgraph = false) }}\n")
    units = costed(f"{plan}compile {{ layers.* = inductor, tok_embeddings = inductor, {{norm, output}} = inductor }}\n")
    assert around.kernels == units.kernels
    assert around.step_time == pytest.approx(units.step_time)
    assert any("`root` breaks at `layers.0`" in item for item in around.assumptions)
    assert not any("operator by operator" in item for item in units.assumptions)
