"""Mixtures of treatments that are tried at the end of a search, against all mixtures."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices, evaluated
from legoai.cost.search.evaluation.evaluator import Figures, Simulation
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.result import SearchResult
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from support.marks import NEEDS_SOLVER
from support.simulation.simulator import in_the_simulator

BLOCKS = 8
TEXT = f"""\
plan test
model   llama3("1b", n_layers = {BLOCKS}, vocab_size = 4096, tie_embeddings = false)
cluster h100_sxm
attention flash
batch   (global = 64, micro = MICRO, seq_len = 2048)
mesh    (dp_shard = 8)
fsdp blocks on dp_shard
checkpoint {{{{ layers.* = auto }}}}
require peak_memory <= {{limit}}
"""
OBJECTIVE = objective_of(None)
STEP = 7
"""Of so many mixtures one is simulated."""
ROUNDED = 1.0 + 1e-9
LIMITS = ("6GiB", "7GiB", "8GiB", "10GiB")


def opened(limit: str, *, micro: str = "4") -> OpenPlan:
    linted = lint(TEXT.replace("MICRO", micro).format(limit=limit), "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def searched(plan: OpenPlan, evaluator: Simulation, bounds: BoundsOf) -> SearchResult:
    return Search(plan, bounds=bounds, evaluator=evaluator, objective=OBJECTIVE).run()


def every_mixture(plan: OpenPlan) -> list[Choices]:
    """All that a rule can say: each listed treatment, and two of them."""
    holes = JointMemory(plan).holes
    pairs = itertools.permutations(holes.listed(0), 2)
    mixed = (holes.value(0, ((one, other, some),)) for one, other in pairs for some in range(1, BLOCKS))
    return [(value,) for value in (*holes.listed(0), *mixed)]


def compared(limit: str) -> list[str]:
    """What is wrong with the answer and the bounds of a search, by some of all mixtures."""
    plan, bounds = opened(limit), BoundsOf()
    with Simulation(directory=Path(), workers=1) as evaluator:
        found = searched(plan, evaluator, bounds)
        assert found.best is not None and found.bound is not None
        best, wrong = found.best.figures.step_time, []
        for choices in every_mixture(plan)[::STEP]:
            candidate = plan.candidate(choices)
            assert candidate.analysis is not None
            [outcome] = evaluator.evaluate([candidate.analysis], None)
            assert isinstance(outcome, Figures)
            seconds, active, least = outcome.step_time, outcome.active, bounds(candidate.analysis)
            if least.step_time > seconds or least.memory > ROUNDED * active:
                wrong.append(f"{choices}: bounds {least}, {seconds} s, {active} bytes")
            limits = {"bound": found.bound, "best": Costs(objective_of(None), bounds).nearly(best)}
            if evaluated(choices, candidate, outcome).feasible:
                wrong += [f"{choices}: {seconds} s, {name} {one}" for name, one in limits.items() if seconds < one]
    return wrong


@NEEDS_SOLVER
@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_no_mixture_is_better_than_bounds_allow(limit: str):
    assert in_the_simulator(compared, limit) == []
