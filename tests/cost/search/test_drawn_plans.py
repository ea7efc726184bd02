"""Random plans with holes are solved or refused with a code; answers have the reported cost, and none is better."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices, evaluated
from legoai.cost.search.evaluation.evaluator import Figures, Simulation
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.solve import solve
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan
from support.marks import NEEDS_SOLVER
from support.texts.open_plans import open_plan

SECONDS = 4
"""For which each is searched: not all of them come to an answer."""


def ran(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "legoai", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@NEEDS_SOLVER
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed == 2 else pytest.mark.slow) for seed in range(40)]
)  # fmt: skip
def test_random_plan_is_solved_or_refused(seed: int, tmp_path: Path):
    (tmp_path / "open.plan").write_text(open_plan(random.Random(seed)), encoding="utf-8")
    solved = str(tmp_path / "solved.plan")
    asked = ("solve", str(tmp_path / "open.plan"), "-o", solved, "--time-limit", f"{SECONDS}", "--json")
    done = ran(*asked, cache=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    if not done.stdout:
        assert "error[LP" in done.stderr
        return
    found = json.loads(done.stdout)
    value, bound = found["objective"]["value"], found["bound"]
    if done.returncode == 1:
        assert value is None
        return
    if bound is not None:
        assert bound >= value if found["objective"]["direction"] == "maximize" else bound <= value
    assert ran("lint", solved, cache=tmp_path).returncode == 0
    cost = ran("cost", solved, "--json", cache=tmp_path)
    assert json.loads(cost.stdout)["step_time_s"] == found["estimate"]["step_time_s"]


def legal(plan: OpenPlan) -> list[tuple[Choices, Candidate]]:
    """Every listed candidate that lint has no error for."""
    ways = itertools.product(*(range(hole.listed) for hole in plan.holes))
    found = [(way, plan.candidate(way)) for way in ways]
    return [(way, one) for way, one in found if not one.errors and one.analysis is not None]


@NEEDS_SOLVER
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2010, 2029, 2037, 2102, 2117, 2132, 2133, 2148])
def test_no_listed_candidate_is_better_than_the_answer_or_its_bound(seed: int):
    """Brute force over three to twenty-four candidates, most of which the search may exclude by a bound."""
    linted = lint(open_plan(random.Random(seed)), "open.plan", directory=Path())
    objective = objective_of(linted.resolution.plan.objective)
    costs = Costs(objective, BoundsOf())
    with Simulation(directory=Path()) as evaluator:
        result = solve(OpenPlan(linted, directory=Path()), evaluator).result
        every = legal(OpenPlan(linted, directory=Path()))
        figures = list(evaluator.evaluate([one.analysis for _, one in every], None))
    tried = [evaluated(*one, found) for one, found in zip(every, figures, strict=True) if isinstance(found, Figures)]
    least = min(costs.of(one) for one in tried if one.feasible)
    assert result.best is not None
    assert result.bound is not None
    assert costs.of(result.best) <= least
    assert costs.value(result.bound) <= least + 1e-9 * abs(least)
