"""Learning-rate schedules: their rates, their limits, and a start at any step."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from legoai.runtime.optimizer.schedule import schedule_end, set_schedule_step, warmup_schedule


def rates(count: int, **schedule) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_schedule(optimizer, **schedule)
    seen = []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_linear_decay_reaches_the_floor_and_stays():
    assert rates(9, warmup=2, steps=6, decay="linear", floor=0.5) == pytest.approx(
        [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0]
    )


def test_cosine_decay_is_half_in_the_middle():
    seen = rates(12, warmup=0, steps=10, decay="cosine", floor=0.0)
    assert seen[0] == 2.0 and seen[5] == pytest.approx(1.0) and seen[10] == seen[11] == 0.0
    assert seen[3] == pytest.approx(1.0 + math.cos(math.pi * 0.3))


def test_a_constant_schedule_stays_at_the_peak():
    assert rates(5, warmup=4, steps=4, decay="constant") == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup": 11}, "warmup must be between 0 and steps = 10"),
        ({"floor": 1.5}, "floor must be a fraction"),
        ({"decay": "sudden"}, "decay must be one of constant, linear, cosine"),
    ],
)
def test_invalid_schedule_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rates(1, **{"warmup": 1, "steps": 10} | change)


def test_setting_the_step_equals_stepping():
    def schedule() -> torch.optim.lr_scheduler.LambdaLR:
        parameters = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1}]
        return warmup_schedule(torch.optim.SGD(parameters, lr=1.0), warmup=3, steps=20)

    stepped, jumped = schedule(), schedule()
    for _ in range(7):
        stepped.optimizer.step()
        stepped.step()
    set_schedule_step(jumped, 7)
    assert [group["lr"] for group in stepped.optimizer.param_groups] == [
        group["lr"] for group in jumped.optimizer.param_groups
    ]
    assert jumped.get_last_lr() == stepped.get_last_lr() and jumped.last_epoch == stepped.last_epoch


def test_a_schedule_without_decay_has_no_end():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    assert schedule_end(warmup_schedule(optimizer, warmup=3, steps=3, decay="constant")) is None
    assert schedule_end(warmup_schedule(optimizer, warmup=3, steps=9, floor=0.5)) == (9, 0.25)


@pytest.mark.parametrize("resumed", [0, 5])
def test_a_first_step_without_update_moves_the_rate_and_warns_of_nothing(resumed: int):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_schedule(optimizer, warmup=0, steps=10, decay="linear")
    if resumed:
        set_schedule_step(scheduler, resumed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * (1 - (resumed + 2) / 10))


def test_other_warnings_of_a_schedule_are_shown():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_schedule(optimizer, warmup=0, steps=10)
    optimizer.step = lambda: None
    with pytest.warns(UserWarning, match="has been overridden"):
        scheduler.step()
