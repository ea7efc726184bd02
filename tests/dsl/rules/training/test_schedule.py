"""Rules about the learning rate agree with the schedule of the runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from legoai.runtime.optimizer.schedule import warmup_schedule
from support.texts.rule_plans import codes


def rates(form: str, warmup: int, steps: int, floor: float) -> list[float]:
    """The learning rate of each step, of a full rate of 1.

    Raises:
        ValueError: the runtime refuses the schedule.
    """
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    decay: Any = form
    schedule = warmup_schedule(optimizer, warmup=warmup, steps=steps, decay=decay, floor=floor)
    found = []
    for _ in range(steps):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("form", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("warmup", "steps", "floor"),
    [(3, 10, 0.1), (10, 10, 0.0), (11, 10, 0.0), (0, 5, 1.0), (0, 5, 0.9), (9, 10, 0.5), (8, 10, 0.5), (0, 1, 0.5)],
)
def test_schedules_are_refused_or_flagged_as_they_behave(form: str, warmup: int, steps: int, floor: float) -> None:
    found = codes(f"schedule {form}(warmup = {warmup}, steps = {steps}, floor = {floor})")
    try:
        decayed = min(rates(form, warmup, steps, floor)[warmup:], default=1.0) < 1.0
    except ValueError:
        assert "LP691" in found
        return
    assert "LP691" not in found
    assert ("LP692" not in found) is decayed


def test_constant_schedule_has_no_decay_diagnostics() -> None:
    assert not codes("schedule constant(warmup = 10)") & {"LP691", "LP692"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("schedule wsd(steps = 10, decay = 1, floor = 0.5, shape = sqrt)", True),
        ("schedule wsd(steps = 10, decay = 2, floor = 0.5, shape = sqrt)", False),
        ("schedule wsd(steps = 10, decay = 10%)", True),
        ("steps 11\nschedule wsd(steps = 10, decay = 1)", False),
    ],
)
def test_decay_of_one_step_is_reported_unless_the_run_reaches_the_floor(text: str, found: bool) -> None:
    assert ("LP692" in codes(text)) is found


@pytest.mark.parametrize(
    ("warmup", "found"), [("1%", True), ("4%", True), ("6%", False), ("1", False), ("0", False), ("0%", False)]
)
def test_warm_up_that_is_rounded_to_no_step_is_reported(warmup: str, found: bool) -> None:
    assert ("LP680" in codes(f"schedule linear(steps = 10, warmup = {warmup})")) is found
