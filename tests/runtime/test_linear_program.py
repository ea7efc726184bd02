"""Integer programs: both solvers, every status, and Ctrl-C."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import warnings

import pytest

from legoai.runtime import linear_program
from legoai.runtime.linear_program import LinearProgram, SolverMissingError
from support.marks import NEEDS_SOLVER

SOLVERS = ("highs", "cbc")


def knapsack(count: int, seed: int) -> LinearProgram:
    """One that takes long: costs are nearly in proportion to sizes."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 2**20) for _ in range(count)]
    program = LinearProgram()
    items = [program.variable(high=1, integer=True, cost=-(size + draw.randrange(1000)) / 2**20) for size in sizes]
    program.at_most({item: 3 * size / sum(sizes) for item, size in zip(items, sizes, strict=True)}, 1.0)
    return program


def product(terms: list[int], point: tuple[int, ...]) -> int:
    return sum(map(int.__mul__, terms, point))


@NEEDS_SOLVER
@pytest.mark.parametrize(("solver", "seeds"), [("highs", range(60)), ("cbc", range(8))])
def test_small_programs_equal_brute_force(solver: str, seeds: range):
    for seed in seeds:
        draw = random.Random(seed)
        cost = [draw.randrange(-9, 10) for _ in range(4)]
        rows = [([draw.randrange(-5, 6) for _ in range(4)], draw.randrange(-6, 12), draw.random() < 0.3) for _ in "123"]
        points = [
            product(cost, point)
            for point in itertools.product(range(4), repeat=4)
            if all(
                product(terms, point) == side if equal else product(terms, point) <= side for terms, side, equal in rows
            )
        ]
        program = LinearProgram()
        for each in cost:
            program.variable(high=3, integer=True, cost=each)
        for terms, side, equal in rows:
            (program.equal if equal else program.at_most)(dict(enumerate(terms)), side)
        found = program.solve(solver=solver)
        assert found.status == ("optimal" if points else "infeasible")
        assert found.objective == found.bound == min(points, default=None)
        assert found.gap == (0.0 if points else None)


@NEEDS_SOLVER
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("limit", [{"node_limit": 1}, {"time_limit": 0.05}])
def test_stopped_solve_reports_its_gap(solver: str, limit: dict):
    found = knapsack(60, 3).solve(solver=solver, **limit)
    assert found.status == "stopped"
    assert found.bound is not None
    if found.values:
        assert found.bound < found.objective
        assert 0.0 < found.gap < 0.2


@NEEDS_SOLVER
@pytest.mark.parametrize("solver", SOLVERS)
def test_continuous_and_empty_programs_are_solved(solver: str):
    program = LinearProgram()
    program.variable(low=0.5, cost=2.0)
    assert program.solve(solver=solver).values == (0.5,)
    assert LinearProgram().solve(solver=solver).objective == 0.0
    program.at_most({}, -1.0)
    assert program.solve(solver=solver).status == "infeasible"


@NEEDS_SOLVER
def test_equal_programs_have_equal_solutions_without_output_or_warning(capfd: pytest.CaptureFixture[str]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for solver in SOLVERS:
            assert len({knapsack(20, 1).solve(solver=solver) for _ in "12"}) == 1
    assert capfd.readouterr() == ("", "")


@NEEDS_SOLVER
def test_process_without_standard_output_solves(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert knapsack(5, 1).solve(solver="highs").status == "optimal"
    assert capfd.readouterr() == ("", "")


@NEEDS_SOLVER
def test_interrupt_stops_the_solver():
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        knapsack(200, 2).solve(time_limit=60.0)
    timer.join()


def test_missing_solver_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_program, "find_spec", lambda _: None)
    assert linear_program.installed() is None
    with pytest.raises(SolverMissingError, match=r"legoai\[solvers\]"):
        knapsack(3, 1).solve()


@pytest.mark.slow
def test_pulp_is_imported_only_to_solve():
    code = (
        "import sys, legoai.runtime.recomputation.budget; sys.exit('pulp' in sys.modules or 'highspy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


KEEPS = """
import gc, weakref
from legoai.runtime.linear_program import LinearProgram


class Activation:
    pass


def step():
    activation = Activation()
    program = LinearProgram()
    program.variable(high=3.5, integer=True, cost=-1.0)
    assert program.solve(solver={solver!r}).values == (3.0,)
    return weakref.ref(activation)


gc.disable()
assert step()() is None
"""


@NEEDS_SOLVER
@pytest.mark.parametrize("solver", SOLVERS)
def test_solver_keeps_no_references_to_callers(solver: str):
    done = subprocess.run(
        [sys.executable, "-c", KEEPS.format(solver=solver)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
