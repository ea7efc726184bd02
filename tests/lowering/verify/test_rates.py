"""Learning rates are compared in the steps of the whole schedule, around the borders of its phases."""

from __future__ import annotations

import pytest

from legoai.lowering.verify.rates import RateDifference, merged, steps_of_schedule
from support.texts.plans import HEAD, resolved

BODY = "batch (global = 4, micro = 1, seq_len = 16)\noptimizer adamw\n"


@pytest.mark.parametrize(
    ("schedule", "borders"),
    [
        ("constant(warmup = 3)", {2, 3, 4}),
        ("wsd(steps = 2_000_000, warmup = 2000, decay = 10%)", {1999, 2000, 2001, 1_800_001, 2_000_000, 4_000_000}),
        ("linear(steps = 5)", {0, 1, 4, 5, 6, 10}),
    ],
)
def test_steps_of_a_schedule(schedule: str, borders: set[int]):
    found = steps_of_schedule(resolved(f"{HEAD}{BODY}schedule {schedule}\n").schedule, 3)
    assert {0, 1, 2} | borders <= set(found)
    assert found == sorted(set(found)) and found[0] == 0
    assert len(found) < 2100


def test_one_difference_of_each_step_is_kept():
    first, second, third = (
        RateDifference(step=step, name=name, own=1.0, wanted=2.0) for step, name in ((5, "a"), (5, "b"), (2, "b"))
    )
    assert merged([[first], [third, second]]) == (third, first)
