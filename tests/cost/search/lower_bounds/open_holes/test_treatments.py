"""Bounds of open treatments: the convex hull of the possible treatments."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.open_holes.treatments import _from, _hull, open_treatments
from legoai.cost.search.lower_bounds.recomputation import Output, least_kept, least_recomputed
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from legoai.specs.directives.checkpoint import Budget
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan small
model llama3("1b", n_layers = 4, vocab_size = 2048, tie_embeddings = false)
cluster h100_sxm(devices = 4)
attention flash
batch (global = 8, micro = 1, seq_len = 4096)
mesh (dp_shard = 2, cp = CP)
CONTEXTfsdp blocks on dp_shard { layers.* = unit(reshard = after_forward) }
checkpoint { layers.* = TREATMENTS }
precision (param = bf16, reduce = fp32)
REQUIRE"""
LISTED = (
    "auto in [none, full, every(2), first(1, full, others = selective([attention])), selective([attention, matmul])]"
)


def opened(treatments: str, *, cp: int = 2, require: str = "") -> OpenPlan:
    text = PLAN.replace("CP", str(cp)).replace("TREATMENTS", treatments)
    text = text.replace("CONTEXT", "context on cp\n" if cp > 1 else "").replace("REQUIRE", require)
    if cp == 1:
        text = text.replace("devices = 4", "devices = 2")
    linted = lint(text, "small.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def compared(cp: int) -> list[str]:
    """Bounds of the open plan under memory limits, and the fastest fitting plan."""
    plan, costs = opened(LISTED, cp=cp), []
    for index in range(plan.holes[0].listed):
        analysis = plan.candidate([index]).analysis
        assert analysis is not None
        found = estimate(lower(analysis), analysis.plan, analysis.manifest)
        costs.append((found.step_time, found.peak_active))
    wrong, before = [], 0.0
    for limit in sorted({peak for _, peak in costs}, reverse=True):
        limited = opened(LISTED, cp=cp, require=f"require peak_memory <= {limit}B\n")
        least = BoundsOf()(limited.candidate([None]).analysis).step_time
        fastest = min(seconds for seconds, peak in costs if peak <= limit)
        if not before <= least <= fastest:
            wrong.append(f"{limit} B: {least} s, which is {before} s with more, and {fastest} s in a simulation")
        before = least
    first = opened(LISTED, cp=cp, require=f"require peak_memory <= {int(0.8 * min(peak for _, peak in costs))}B\n")
    free = BoundsOf()(plan.candidate([None]).analysis).step_time
    assert BoundsOf()(first.candidate([None]).analysis).step_time > free
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_open_treatment_bound_rises_as_memory_shrinks(cp: int):
    assert in_the_simulator(compared, cp) == []


def test_open_treatment_includes_budgets_except_with_cp():
    for cp, budgets in ((1, 3), (2, 0)):
        plan = opened("auto", cp=cp)
        analysis = plan.candidate([None]).analysis
        assert analysis is not None
        found = open_treatments(analysis)
        assert len(found) == 5 + budgets
        assert sum(isinstance(one, Budget) for one in found) == budgets
    assert len(open_treatments(opened(LISTED).candidate([None]).analysis)) == 4


def test_no_mixture_is_below_the_hull():
    points = [Output(10.0, 0.0), Output(9.5, 5.0), Output(5.0, 5.0), Output(4.0, 9.0), Output(1.0, 10.0)]
    hull = _hull([(one, name) for one, name in zip(points, "abcde", strict=True)])
    assert (hull.sides, hull.least) == ([Output(5.0, 5.0), Output(4.0, 5.0)], 1.0)
    assert hull.corners == ["a", "c", "e"]
    assert [hull.around(room) for room in (-1.0, 0.0, 4.9, 5.0, 9.9, 10.0, 99.0)] == [
        ["a"], ["a", "c"], ["a", "c"], ["c", "e"], ["c", "e"], ["e"], ["e"],
    ]  # fmt: skip
    for some in itertools.combinations_with_replacement(points, 4):
        room, seconds = sum(one.bytes for one in some), sum(one.seconds for one in some)
        least = least_recomputed([Output(4 * one.seconds, 4 * one.bytes) for one in hull.sides], room)
        assert least + 4 * hull.least <= seconds + 1e-9


def test_least_kept_is_the_inverse_of_least_recomputed():
    outputs = [Output(3.0, 2.0), Output(1.0, 4.0), Output(2.0, 1.0)]
    for seconds in (0.0, 0.5, 1.0, 2.5, 4.0, 6.0):
        assert least_recomputed(outputs, least_kept(outputs, seconds)) == pytest.approx(seconds)
    assert least_kept(outputs, 7.0) == 0.0
    # No less than given, and no less than fractions of outputs allow.
    found = list(_from(outputs, 0.5, 0.5))
    assert found == [Output(5.0, 0.5), Output(4.0, 1.0), Output(1.0, 3.0), Output(0.5, 5.0)]
    assert list(_from(outputs, 2.0, 6.0)) == [Output(2.0, 6.0), Output(2.0, 6.0)]
