"""Choice of saved outputs within a memory budget: greedy, by a knapsack, or by an integer program.

All three maximise the cost of the saved items whose sizes fit (the dissertation, section 5.5, equivalently minimises
the cost of the recomputed ones). An item is an operator, or several that are saved together or not at all.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from legoai.runtime import linear_program
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.linear_program import LinearProgram, SolverFailedError

Method = Literal["greedy", "knapsack", "ilp"]
Item = tuple[int, float]
"""Bytes of saving an item, and the cost of recomputing it."""

_STEPS: Final = 4096
"""Into how many pieces the knapsack divides the budget."""
_NODES: Final = 2000
"""Limit of nodes of the integer program: unlike a time limit, it ends the search of every rank at the same point, and
ranks that saved different collectives would deadlock."""


def need_solver(by: Method) -> None:
    """Check that a method can be used, before anything is computed.

    Raises:
        RunError: the method is an integer program, and no solver is installed.
    """
    if by == "ilp" and linear_program.installed() is None:
        raise RunError(
            RunErrorCode.NO_SOLVER,
            "the plan chooses operators by an integer program (`by = ilp`), and PuLP or its solver is not installed",
            help=f"{linear_program.INSTALL}, or write `by = knapsack`",
        )


@lru_cache(maxsize=256)
def choose(items: tuple[Item, ...], budget: int, *, by: Method) -> frozenset[int]:
    """Return the indices of the items to save, of at most ``budget`` bytes in total.

    Args:
        items: bytes and cost of each.
        budget: bytes.
        by: `greedy` passes once over the items in the order of cost per byte; `knapsack` solves the 0/1 knapsack
            problem with sizes rounded up to 1/4096 of the budget, and is never worse than `greedy`; `ilp` solves it
            without rounding, and is never worse than `knapsack`.

    Raises:
        RunError: `ilp` has no solver, or the solver failed.
    """
    worthy = [place for place, (size, cost) in enumerate(items) if 0 < size <= budget and cost > 0]
    found = [_greedy(items, worthy, budget)]
    if by != "greedy":
        found.append(_knapsack(items, worthy, budget))
    if by == "ilp":
        found.append(_integer_program(items, worthy, budget))
    return max(found, key=lambda places: sum(items[place][1] for place in sorted(places)))


def _greedy(items: Sequence[Item], places: Sequence[int], budget: int) -> frozenset[int]:
    taken = set()
    for place in sorted(places, key=lambda place: (-items[place][1] / items[place][0], place)):
        if items[place][0] <= budget:
            taken.add(place)
            budget -= items[place][0]
    return frozenset(taken)


def _knapsack(items: Sequence[Item], places: Sequence[int], budget: int) -> frozenset[int]:
    if not places:
        return frozenset()
    unit = max(1, budget // _STEPS)
    capacity = budget // unit
    best = np.zeros(capacity + 1)
    improved = []
    for place in places:
        size, cost = items[place]
        weight = -(-size // unit)
        with_it = np.full_like(best, -1.0)
        with_it[weight:] = best[: max(capacity + 1 - weight, 0)] + cost
        improved.append(with_it > best)
        best = np.maximum(best, with_it)
    taken, room = set(), capacity
    for place, better in zip(reversed(places), reversed(improved), strict=True):
        if better[room]:
            taken.add(place)
            room -= -(-items[place][0] // unit)
    return frozenset(taken)


def _integer_program(items: Sequence[Item], places: Sequence[int], budget: int) -> frozenset[int]:
    """Return the best items; equal items share a variable, the number of those that are saved."""
    equal: defaultdict[Item, list[int]] = defaultdict(list)
    for place in places:
        equal[items[place]].append(place)
    if not equal:
        return frozenset()
    unit = math.gcd(*(size for size, _ in equal))
    dearest = max(cost for _, cost in equal)
    room = budget // unit
    while True:
        program = LinearProgram()
        counts = [
            program.variable(high=min(len(alike), room // (size // unit)), integer=True, cost=-cost / dearest)
            for (size, cost), alike in equal.items()
        ]
        # Coefficients are shares of the room, which rounding then concerns in proportion.
        sizes = {count: size // unit for count, (size, _) in zip(counts, equal, strict=True)}
        program.at_most({count: size / max(room, 1) for count, size in sizes.items()}, 1.0 if room else 0.0)
        values = _solved(program)
        used = sum(sizes[count] * round(value) for count, value in zip(counts, values, strict=True))
        if used * unit <= budget:
            break
        room -= used - budget // unit  # by so much the solver's rounding was too generous
    kept: set[int] = set()
    for alike, value in zip(equal.values(), values, strict=True):
        kept.update(alike[: round(value)])
    return frozenset(kept)


def _solved(program: LinearProgram) -> tuple[float, ...]:
    """Return the values that a solver finds."""
    need_solver("ilp")
    try:
        found = program.solve(node_limit=_NODES)
    except SolverFailedError as error:
        raise RunError(
            RunErrorCode.NO_SOLVER,
            f"the solver of `by = ilp` failed: {error}",
            help="write `by = knapsack`",
        ) from error
    assert found.status != "infeasible", "keeping nothing is feasible"
    if found.status == "stopped":
        how_far = "" if found.gap is None else f", whose cost is within {found.gap:.2g} of the best"
        warnings.warn(
            f"the integer program of `by = ilp` stopped after {_NODES} nodes with a choice{how_far}", stacklevel=2
        )
    return found.values or (0.0,) * len(program)
