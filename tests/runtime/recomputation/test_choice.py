"""Choice of operators to save: within the budget, with the quality of its method, optimal where that is exact."""

from __future__ import annotations

import itertools
import random

import pytest

from legoai.runtime.errors import RunError
from legoai.runtime.linear_program import SolverFailedError
from legoai.runtime.recomputation import choice as recompute_choice
from legoai.runtime.recomputation.choice import Item, choose
from support.marks import NEEDS_SOLVER, some_slow

Items = tuple[Item, ...]


def instance(seed: int) -> tuple[Items, int]:
    """Items with some that are equal, some without a cost, and a budget for none, some or all of them."""
    draw = random.Random(seed)
    items = [(draw.randrange(1, 60), float(draw.randrange(0, 100))) for _ in range(draw.randrange(1, 10))]
    items += draw.choices(items, k=draw.randrange(0, 3))
    if seed % 3 == 0:
        items = [(size * 2**20, cost * 1e9) for size, cost in items]
    return tuple(items), draw.randrange(0, sum(size for size, _ in items) + 2)


def best_of(items: Items, budget: int) -> float:
    """The greatest cost of all sets that fit."""
    sums = [(0, 0.0)]
    for size, cost in items:
        sums += [(held + size, worth + cost) for held, worth in sums if held + size <= budget]
    return max(worth for _, worth in sums)


def worth(items: Items, places: frozenset[int]) -> float:
    return sum(items[place][1] for place in places)


def size(items: Items, places: frozenset[int]) -> int:
    return sum(items[place][0] for place in places)


@pytest.mark.parametrize("tens", range(30))
def test_greedy_and_knapsack_are_bounded_by_brute_force(tens: int):
    for seed in range(10 * tens, 10 * tens + 10):
        items, budget = instance(seed)
        best = best_of(items, budget)
        greedy, knapsack = (choose(items, budget, by=by) for by in ("greedy", "knapsack"))
        assert max(size(items, greedy), size(items, knapsack)) <= budget
        fitting = [cost for bytes_, cost in items if bytes_ <= budget]
        assert best <= worth(items, greedy) + max(fitting, default=0.0)  # the relaxation cuts one item at most
        # Rounded up by less than 1/4096 of the budget each, what fits a budget smaller by that much is found.
        assert best_of(items, budget - len(items) * (budget // 4096)) <= worth(items, knapsack) <= best


@NEEDS_SOLVER
@pytest.mark.parametrize("tens", some_slow(range(20), *range(8, 20)))
def test_integer_program_equals_brute_force(tens: int, monkeypatch: pytest.MonkeyPatch):
    # Else the better of the other two methods would stand in for it.
    monkeypatch.setattr(recompute_choice, "_greedy", lambda *_: frozenset())
    monkeypatch.setattr(recompute_choice, "_knapsack", lambda *_: frozenset())
    for seed in range(1000 + 10 * tens, 1000 + 10 * tens + 10):
        items, budget = instance(seed)
        taken = choose.__wrapped__(items, budget, by="ilp")
        assert size(items, taken) <= budget
        assert worth(items, taken) == best_of(items, budget)


@NEEDS_SOLVER
def test_equal_items_share_a_variable(monkeypatch: pytest.MonkeyPatch):
    variables = []
    solved = recompute_choice._solved
    monkeypatch.setattr(recompute_choice, "_solved", lambda one: (variables.append(len(one)), solved(one))[1])
    items = ((7, 3.0), (5, 2.0)) * 200
    taken = choose.__wrapped__(items, 1000, by="ilp")
    assert variables == [2]
    assert worth(items, taken) == 428.0  # 140 of the first and 4 of the second fill 1000 bytes


@pytest.mark.parametrize("by", ["knapsack", pytest.param("ilp", marks=NEEDS_SOLVER)])
def test_large_choice_stays_within_its_budget(by: str):
    draw = random.Random(0)
    items = tuple((draw.randrange(1, 2**28), draw.random() * 1e12) for _ in range(150))
    budget = sum(bytes_ for bytes_, _ in items) // 3
    order = ("greedy", "knapsack", "ilp")
    taken = {name: choose(items, budget, by=name) for name in order[: order.index(by) + 1]}
    assert all(size(items, places) <= budget for places in taken.values())
    for less, more in itertools.pairwise(taken.values()):
        assert worth(items, less) <= worth(items, more)


def test_solver_failure_is_an_error_with_a_code(monkeypatch: pytest.MonkeyPatch):
    def fails(*_, **__):
        raise SolverFailedError("no license")

    monkeypatch.setattr("legoai.runtime.linear_program.installed", lambda: "highs")
    monkeypatch.setattr("legoai.runtime.linear_program.LinearProgram.solve", fails)
    with pytest.raises(RunError, match=r"RUN046.*no license"):
        choose.__wrapped__(((7, 3.0), (5, 2.0)), 10, by="ilp")


def test_unfinished_choice_gives_a_warning(monkeypatch: pytest.MonkeyPatch):
    from legoai.runtime.linear_program import Solution

    def stops(*_, **__):
        return Solution(status="stopped", values=(1.0, 0.0), objective=-1.0, bound=-1.5)

    monkeypatch.setattr("legoai.runtime.linear_program.installed", lambda: "highs")
    monkeypatch.setattr("legoai.runtime.linear_program.LinearProgram.solve", stops)
    with pytest.warns(UserWarning, match="stopped after 2000 nodes .* within 0.5 of the best"):
        assert choose.__wrapped__(((7, 3.0), (5, 2.0)), 10, by="ilp") == {0}
