"""The benchmark of bounds: what it draws, and what it counts."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
from benchmarks.bounds import Tally, check, drawn_plan, row_of

from benchmarks import bounds as command
from legoai.cost.search.bounds import Bounds, BoundsOf
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from support.simulated import in_a_fork


def test_most_drawn_plans_are_clean_and_open():
    draw = random.Random(1)
    clean = 0
    for _ in range(20):
        linted = lint(drawn_plan(draw), "drawn.plan", directory=Path())
        if not linted.has_errors:
            plan = OpenPlan(linted, directory=Path())
            assert not plan.refused
            assert len(plan.holes) >= 3
            clean += 1
    assert clean >= 15


def checked(excess: float) -> Tally:
    """Two candidates of a drawn plan, with bounds that are too high by a factor."""
    command.CANDIDATES_OF_ONE_PLAN = 2
    bounded = BoundsOf.__call__

    def too_high(self: BoundsOf, analysis: object) -> Bounds:
        found = bounded(self, analysis)
        return Bounds(step_time=found.step_time * excess, memory=found.memory)

    BoundsOf.__call__ = too_high
    tally, draw = Tally(), random.Random(5)
    while tally.candidates < 2:
        for _ in check(draw, tally, time.monotonic() + 120):
            pass
    return tally


@pytest.mark.slow
def test_bounds_below_what_is_simulated_are_counted_and_those_above_told():
    tally = in_a_fork(checked, 1.0)
    assert tally.violations == []
    assert tally.candidates == 2
    assert 2 <= tally.bounds <= 10
    assert all(0.0 < share <= 1.0 for share in (*tally.time, *tally.memory))
    row = row_of(tally, 5, 1.0)
    assert row["time_share"]["least"] <= row["time_share"]["mean"] <= row["time_share"]["most"]
    above = in_a_fork(checked, 1e6)
    assert above.violations
    assert math.isclose(above.time[0], 1e6 * tally.time[0])
