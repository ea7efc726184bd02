"""Costs of buckets: one simulation predicts those of other buckets, and the solver simulates the predicted ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.report.solution import document, terminal
from legoai.cost.search.buckets.costs import problems_of
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures, Simulation
from legoai.cost.search.solve import Solution, solve
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan

PLAN = """\
plan open_buckets

model   llama3("tiny", n_layers = 4, dim = 4096, n_heads = 32, max_seq_len = 4096)
cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
batch   (global = 32, micro = 1, seq_len = 4096)
mesh    (dp_shard = 32)
fsdp on dp_shard (backend = graph) { layers.* = unit }
comm (reorder = true) { layers.* = auto }
"""


def opened(text: str) -> OpenPlan:
    linted = lint(text, "buckets.plan", directory=Path())
    assert not [item for item in linted.diagnostics if item.severity == "error"]
    return OpenPlan(linted, directory=Path())


@pytest.fixture(scope="module")
def solution() -> Solution:
    with Simulation(directory=Path(), workers=2) as evaluator:
        return solve(opened(PLAN), evaluator)


@pytest.mark.slow
def test_solved_buckets_are_simulated_with_the_listed_ones(solution: Solution):
    values = {solution.plan.holes[0].choices[item.choices[0]] for item in solution.result.evaluated}
    assert {"bucket(module)", "bucket(group)"} < values
    assert solution.result.status == "bounded"
    assert solution.best is not None
    assert solution.best.figures.step_time == min(item.figures.step_time for item in solution.result.evaluated)
    [bucket] = document(solution, None)["buckets"]
    assert bucket["line"] == 8
    assert bucket["least"]["added_s"] <= bucket["algorithm_1"]["added_s"]
    assert bucket["least"]["value"] in values
    assert bucket["least"]["step_time_s"] is not None
    assert "Algorithm 1" in terminal(solution)


@pytest.mark.slow
def test_one_simulation_predicts_the_cost_of_other_buckets(solution: Solution):
    plan, found = solution.plan, solution.result
    by_value = {plan.holes[0].choices[item.choices[0]]: item for item in found.evaluated}
    module = by_value["bucket(module)"]
    analysis = plan.candidate(module.choices).analysis
    bounds = BoundsOf()
    [(_, problem)] = problems_of(analysis, module.figures.units, bounds.machine(analysis), float("inf"))
    foreseen, took = {}, {}
    for value, item in by_value.items():
        counts = {"bucket(module)": (1,) * 4, "bucket(group)": (4,)}.get(value)
        counts = counts or tuple(int(number) for number in value.removeprefix("bucket([").removesuffix("])").split(","))
        foreseen[value], took[value] = problem.added(counts), item.figures.step_time
    for value, seconds in foreseen.items():
        more, predicted = took[value] - took["bucket(module)"], seconds - foreseen["bucket(module)"]
        assert more == pytest.approx(predicted, abs=0.01 * took["bucket(module)"]), value
    assert Figures.read(module.figures.document()).units == module.figures.units


def test_bucket_rule_with_a_domain_is_searched_unchanged():
    [hole] = opened(PLAN.replace("= auto }", "= auto in [bucket(module), bucket([1, 3])] }")).holes
    assert not hole.buckets
    assert hole.choices == ("bucket(module)", "bucket([1, 3])")
