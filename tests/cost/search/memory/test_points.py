"""Memory of mixed treatments, predicted from observed plans that treat all blocks equally."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.memory.points import MemoryPoints
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

BLOCKS = 12
TEXT = f"""\
plan test
model   llama3("tiny", n_layers = {BLOCKS})
cluster h100_sxm(devices = 4)
batch   (global = {{batch}}, micro = 4, seq_len = 1024)
mesh    (dp_shard = 4)
fsdp on dp_shard {{{{ layers.* = {{unit}} }}}}
checkpoint {{{{ layers.* = {{treatment}} }}}}
"""


def figures(text: str) -> Figures:
    analysis = lint(text, "test.plan", directory=Path()).analysis
    assert analysis is not None and analysis.manifest is not None
    return Figures.of(estimate(lower(analysis), analysis.plan, analysis.manifest, directory=Path()), analysis)


def seen(batch: int, unit: str, treatment: str) -> tuple[MemoryPoints, float]:
    found = in_the_simulator(figures, TEXT.format(batch=batch, unit=unit, treatment=treatment))
    return found.points, found.metric("peak_memory", "bytes")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, 64])
def test_peak_of_mixed_treatments_follows_from_uniform_ones(batch: int):
    none, peak = seen(batch, "unit", "none")
    full, _ = seen(batch, "unit", "full")
    kept, _ = seen(batch, "unit(reshard = after_backward)", "none")
    assert none.blocks == full.blocks == kept.blocks == BLOCKS
    assert none.peak == peak
    unsharded = kept.released - none.released
    assert kept.peak - none.peak == pytest.approx(BLOCKS * unsharded, rel=0.02)
    # The last blocks keep all: the turn is as it is without recomputation, but for what the first ones do not hold.
    _, divided = seen(batch, "unit", "first(5, full)")
    assert divided == pytest.approx(none.peak - 5 * (none.released - full.released), rel=0.01)
    _, both = seen(batch, "first(3, unit, others = unit(reshard = after_backward))", "first(5, full)")
    assert both == pytest.approx(none.peak - 5 * (none.released - full.released) + 9 * unsharded, rel=0.01)
