"""Estimates of plans that recompute within a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

import legoai
from support.marks import NEEDS_SOLVER
from support.simulation.simulator import in_the_simulator
from support.texts.plans import SEQUENCE_PARALLEL

PLAN = f"""plan small

model   llama3("tiny")
cluster h100_sxm
batch   (global = 16, micro = 2, seq_len = 128)
mesh    (dp_shard = 4, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {{ layers.* = unit, root = unit }}
"""


def figures(folder: Path, treatments: list[str]) -> list[tuple[float, float]]:
    """Seconds of recomputation, and peak bytes."""
    found = []
    for treatment in treatments:
        path = folder / "small.plan"
        path.write_text(f"{PLAN}checkpoint {{ layers.* = {treatment} }}\n", encoding="utf-8")
        estimate = legoai.estimate(path)
        found.append((estimate.recompute, estimate.peak_active))
    return found


@NEEDS_SOLVER
@pytest.mark.slow
def test_budget_trades_memory_for_recomputation(tmp_path: Path):
    treatments = ["full", "budget(1%, by = knapsack)", "budget(30%, by = ilp)"]
    (recompute, peak), little, more = in_the_simulator(figures, tmp_path, treatments)
    assert little == (pytest.approx(recompute), pytest.approx(peak, rel=0.02))
    assert 0.0 < more[0] < recompute
    assert more[1] > peak
