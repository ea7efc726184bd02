"""Peak memory of mixed treatments, bounded by simulated steps that treat all blocks equally."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.branch_and_bound.mixtures import Mixtures
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidate_bounds.observed_peaks import ObservedPeaks, peak_of
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.lower_bounds.memory_bound_kernels import repeated_blocks
from legoai.cost.search.lower_bounds.observed.blocks import treatments_of_blocks
from legoai.cost.search.memory.points import MemoryPoints
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import Linted, lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

BLOCKS = 12
TEXT = f"""\
plan test
model   llama3("1b", n_layers = {BLOCKS}, vocab_size = 4096, tie_embeddings = false)
cluster h100_sxm
attention flash
batch   (global = BATCH, micro = 2, seq_len = 2048)
MESH
checkpoint {{ RULES }}
precision (param = bf16, reduce = fp32)
"""
SHARDED = "mesh (dp_shard = 8)\nfsdp blocks on dp_shard"
KEPT = "mesh (dp_shard = 8)\nfsdp blocks on dp_shard { layers.* = unit(reshard = after_backward) }"
CUT = "mesh (dp_shard = 4, tp = 2)\nshard standard on tp (sequence)\nfsdp blocks on dp_shard"
UNIFORM = ("none", "full", "selective([attention])", "budget(0.5)")
MIXED = (
    "first(1, full)",
    "first(4, full, others = selective([attention]))",
    "first(5, selective([attention]), others = budget(0.5))",
    "first(6, none, others = full)",
    "first(10, budget(0.5))",
    "first(11, selective([attention]))",
    "every(2)",
)
CLOSE = 0.95
"""Least share of the simulated peak in its bound, in which the backward of the last block does not count."""
ROUNDED = 1.0 + 1e-9


def analysed(rules: str, *, mesh: str = SHARDED, batch: str = "64") -> Analysis:
    text = TEXT.replace("MESH", mesh).replace("BATCH", batch).replace("RULES", rules)
    linted = lint(text, "test.plan", directory=Path())
    assert linted.analysis is not None, linted.diagnostics
    return linted.analysis


def simulated(analysis: Analysis) -> Figures:
    assert analysis.manifest is not None
    return Figures.of(estimate(lower(analysis), analysis.plan, analysis.manifest), analysis)


def peaks(mesh: str, batch: str, mixed: tuple[str, ...]) -> list[tuple[str, float, float]]:
    """Bounds and simulated peaks of mixed treatments."""
    seen, found = ObservedPeaks(), []
    for treatment in UNIFORM:
        analysis = analysed(f"layers.* = {treatment}", mesh=mesh, batch=batch)
        assert seen.of(analysis) == 0.0
        figures = simulated(analysis)
        seen.observe(analysis, figures.points)
        found.append((treatment, seen.of(analysis), figures.active))
    for treatment in mixed:
        analysis = analysed(f"layers.* = {treatment}", mesh=mesh, batch=batch)
        found.append((treatment, seen.of(analysis), simulated(analysis).active))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "batch", "mixed"),
    [
        pytest.param(SHARDED, "16", MIXED[1:5:2], id="one micro batch"),
        pytest.param(SHARDED, "64", MIXED, id="sharded"),
        pytest.param(KEPT, "64", MIXED, id="unsharded until backward"),
        pytest.param(CUT, "32", MIXED, id="tensor parallel"),
    ],
)
def test_peaks_of_mixtures_follow_from_those_of_their_treatments(mesh: str, batch: str, mixed: tuple[str, ...]):
    found = in_the_simulator(peaks, mesh, batch, mixed)
    assert [one for one in found if not CLOSE * one[2] <= one[1] <= ROUNDED * one[2]] == []


POINTS = MemoryPoints(blocks=4, peak=100.0, released=10.0, inside=95.0)


def test_turn_counts_only_where_the_last_blocks_are_alike():
    less = replace(POINTS, peak=70.0, released=2.0, inside=80.0)
    assert peak_of([(POINTS, 4)]) == 100.0
    assert peak_of([(less, 2), (POINTS, 2)]) == 100.0 - 2 * 8.0
    # In the third block's backward two others hold as much; the first one's has only its own treatment.
    assert peak_of([(less, 3), (POINTS, 1)]) == 80.0 - 2.0
    assert peak_of([(less, 1)]) == 0.0


def test_other_units_and_unseen_treatments_are_not_known():
    seen = ObservedPeaks()
    seen.observe(analysed("layers.* = full"), POINTS)
    assert seen.revision == 1
    assert seen.of(analysed("layers.* = full")) == 100.0
    assert seen.of(analysed("layers.* = first(3, full)")) == 0.0
    assert seen.of(analysed("layers.* = full", mesh=KEPT)) == 0.0
    assert seen.of(analysed("layers.* = full", mesh=f"{SHARDED}\noffload (activations = all)")) == 0.0


@pytest.mark.parametrize("rules", ["layers.*.attention = full", "* = full"])
def test_blocks_with_treated_parts_have_no_treatment_of_their_own(rules: str):
    analysis = analysed(rules)
    assert treatments_of_blocks(analysis) == {}
    seen = ObservedPeaks()
    seen.observe(analysed("layers.* = none"), POINTS)
    assert seen.of(analysis) == 0.0


UNEQUAL = """\
plan test
model   deepseek("tiny", n_layers = 9, n_dense_layers = 2)
cluster h100_sxm
batch   (global = 64, micro = 2, seq_len = 128)
mesh    (dp_shard = 8)
fsdp blocks on dp_shard
checkpoint { layers.* = RULE }
"""


def test_unequal_blocks_have_no_peaks_and_no_mixtures():
    def linted(rule: str) -> Linted:
        found = lint(UNEQUAL.replace("RULE", rule), "test.plan", directory=Path())
        assert not found.has_errors, found.diagnostics
        return found

    analysis = linted("none").analysis
    assert analysis is not None and analysis.manifest is not None
    assert not repeated_blocks(analysis.manifest)
    seen = ObservedPeaks()
    seen.observe(analysis, POINTS)
    assert seen.of(analysis) == 0.0
    plan = OpenPlan(linted("auto"), directory=Path())
    joint = JointMemory(plan)
    assert joint.holes.apply
    state = SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf()))
    assert Mixtures(state, joint)._left((None,)) is None
