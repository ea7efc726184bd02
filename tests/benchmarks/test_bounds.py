"""Benchmark of the search's bounds: random plans, and the counts of a run."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.bounds import Tally, check, path_to, row_of
from benchmarks.drawn_plans import drawn_family, opened

from benchmarks import bounds as command
from benchmarks import drawn_plans
from legoai.cost.search.candidate_bounds.bounds import Bounds, BoundsOf
from support.simulation.simulated import in_a_fork


@pytest.mark.slow
def test_most_drawn_plans_are_clean_and_open():
    draw = random.Random(1)
    clean = 0
    for _ in range(20):
        family = drawn_family(draw)
        plan = opened(family, family.variants[0])
        clean += plan is not None and len(plan.holes) >= 3
    assert clean >= 15


def test_path_leads_from_a_candidate_to_the_root():
    way = list(path_to(random.Random(1), (2, 0, 1)))
    assert (way[0], way[-1]) == ([2, 0, 1], [None] * 3)
    assert [kept.count(None) for kept in way] == [0, 1, 2, 3]
    assert all(index in (None, own) for kept in way for index, own in zip(kept, (2, 0, 1), strict=True))


def checked(excess: float) -> Tally:
    """Two candidates of a drawn family and more, with bounds that are too high by a factor."""
    command.CHOSEN = drawn_plans.VARIANTS = command.LIMITED = 1
    command.LIMITS = (1.0,)
    bounded = BoundsOf.__call__

    def too_high(self: BoundsOf, analysis: object) -> Bounds:
        found = bounded(self, analysis)
        return Bounds(step_time=found.step_time * excess, memory=found.memory)

    BoundsOf.__call__ = too_high
    tally, draw = Tally(), random.Random(5)
    while tally.candidates < 2:
        for _ in check(draw, tally):
            pass
    return tally


@pytest.mark.slow
def test_bounds_above_the_simulation_are_violations():
    tally = in_a_fork(checked, 1.0)
    assert tally.violations == []
    assert tally.candidates >= 2
    assert 1 <= tally.costs <= tally.candidates
    assert 4 * tally.candidates <= tally.bounds <= 9 * tally.candidates
    assert all(0.0 < share <= 1.0 for share in (*tally.time, *tally.memory))
    row = row_of(tally, 5, 1.0)
    assert row["time_share"]["least"] <= row["time_share"]["mean"] <= row["time_share"]["most"]
    above = in_a_fork(checked, 1e6)
    assert above.violations
    assert math.isclose(above.time[0], 1e6 * tally.time[0])
