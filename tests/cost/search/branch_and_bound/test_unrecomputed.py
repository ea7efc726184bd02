"""Candidates that recompute nothing: which are simulated to bound other treatments, and that they are fastest."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.branch_and_bound import unrecomputed as unrecomputed_candidates
from legoai.cost.search.branch_and_bound.unrecomputed import Unrecomputed, recomputes_nothing
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.state import SearchState
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan test
model   llama3("1b", n_layers = 8, vocab_size = 4096, tie_embeddings = false)
cluster h100_sxm
attention flash
batch   (global = 64, micro = MICRO, seq_len = 2048)
MESH
checkpoint { layers.* = TREATMENT }
"""
SHARDED = "mesh (dp_shard = 8)\nfsdp blocks on dp_shard"
STAGED = """\
mesh (pp = 4, dp_shard = 2)
fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
pipeline on pp (schedule = SCHEDULE)"""


def opened(treatment: str = "auto", *, micro: str = "auto in [1, 2, 4]", mesh: str = SHARDED) -> OpenPlan:
    text = PLAN.replace("TREATMENT", treatment).replace("MICRO", micro).replace("MESH", mesh)
    linted = lint(text, "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def state_of(plan: OpenPlan) -> SearchState:
    return SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf(None)))


def groups(plan: OpenPlan) -> list[Choices]:
    """The choices of the micro batch, with the treatment of blocks open."""
    [micro] = [index for index, hole in enumerate(plan.holes) if hole.what == "batch micro"]
    return [tuple(value if index == micro else None for index in range(len(plan.holes))) for value in range(3)]


def treatments(plan: OpenPlan, found: list[Choices]) -> list[list[str]]:
    return [[hole.choices[one] for hole, one in zip(plan.holes, choices, strict=True)] for choices in found]


def test_untried_treatments_of_least_bounds_are_bounded_first_and_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unrecomputed_candidates, "_AT_ONCE", 2)
    plan = opened()
    one, two, three = groups(plan)
    unrecomputed = Unrecomputed(state_of(plan), JointMemory(plan))
    untried = {one: 7.0, two: 5.0, three: 6.0}
    assert treatments(plan, unrecomputed.wanted(untried, 10.0)) == [["2", "none"], ["4", "none"]]
    assert treatments(plan, unrecomputed.wanted(untried, 10.0)) == [["2", "full"], ["4", "full"]]
    assert unrecomputed.wanted(untried, 10.0) == []  # the least bound has not changed
    untried |= {two: 9.0, three: 9.99}
    assert treatments(plan, unrecomputed.wanted(untried, 10.0)) == [["1", "none"]]


def test_candidates_of_groups_are_given_once():
    plan = opened()
    one, two, _ = groups(plan)
    unrecomputed = Unrecomputed(state_of(plan), JointMemory(plan))
    assert treatments(plan, unrecomputed.of([one])) == [["1", "none"]]
    assert treatments(plan, unrecomputed.of([one, two])) == [["1", "full"], ["2", "none"]]
    assert treatments(plan, unrecomputed.of([one, two])) == [["2", "full"]]
    assert unrecomputed.of([one, two]) == []


def test_bounds_above_the_limit_and_other_open_holes_are_left():
    plan = opened()
    one, *_ = groups(plan)
    unrecomputed = Unrecomputed(state_of(plan), JointMemory(plan))
    assert unrecomputed.wanted({one: 9.96}, 9.95) == []
    assert unrecomputed.wanted({(None,) * len(plan.holes): 5.0, one: 6.0}, 9.95) == []
    assert len(unrecomputed.wanted({one: 9.94}, 9.95)) == 1


@pytest.mark.parametrize(
    ("treatment", "mesh", "nothing"),
    [
        ("none", SHARDED, True),
        ("full", SHARDED, False),
        ("first(3, full)", SHARDED, False),
        ("none", f"{SHARDED}\ncompile {{ layers.* = inductor }}", False),
    ],
)
def test_compiled_blocks_may_recompute_without_a_treatment(treatment: str, mesh: str, nothing: bool):
    analysis = opened(treatment, micro="1", mesh=mesh).candidate(()).analysis
    assert analysis is not None
    assert recomputes_nothing(analysis) is nothing


def step_times(mesh: str, treatments: list[str]) -> list[float]:
    found = []
    for treatment in treatments:
        analysis = opened(treatment, micro="2", mesh=mesh).candidate(()).analysis
        assert analysis is not None
        assert analysis.manifest is not None
        found.append(estimate(lower(analysis), analysis.plan, analysis.manifest, whole=True).step_time)
    return found


WHOLE = ["none", "full", "every(2)", "first(3, full)"]
PARTS = ["none", "selective([attention, matmul])", "full", "every(2)", "budget(0.5)", "first(3, full)"]
CUT = "mesh (dp_shard = 4, tp = 2)\nshard standard on tp (sequence)\nfsdp blocks on dp_shard"
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "InterleavedZeroBubble")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "treatments"),
    [
        pytest.param(SHARDED, WHOLE[:2], id="sharded"),
        pytest.param(SHARDED, PARTS, id="parts of blocks"),
        pytest.param(CUT, PARTS, id="tensor parallel"),
        *(pytest.param(STAGED.replace("SCHEDULE", name), WHOLE, id=name) for name in SCHEDULES),
    ],
)
def test_no_step_is_faster_than_one_that_recomputes_nothing(mesh: str, treatments: list[str]):
    nothing, *others = in_the_simulator(step_times, mesh, treatments)
    assert all(one >= nothing for one in others)
