"""Learning-rate schedules: warm-up, a stable phase and decay, as functions of the step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

Decay = Literal["constant", "linear", "cosine", "sqrt"]


def warmup_schedule(
    optimizer: torch.optim.Optimizer,
    *,
    warmup: int,
    steps: int,
    stable: int = 0,
    decay: Decay = "cosine",
    floor: float = 0.0,
) -> LambdaLR:
    """Return a linear warm-up over `warmup` steps, `stable` steps at the peak, then a decay until step `steps`.

    Step 0 already trains, at 1/warmup of the optimizer's learning rate; step `warmup - 1` is the first at
    the whole of it. The decay reaches `floor` at step `steps` and stays there.

    Args:
        optimizer: its groups' `lr` is the peak.
        warmup: steps; 0 for none.
        steps: the length of the schedule, warm-up included.
        stable: steps at the peak between warm-up and decay.
        decay: the form of the decay; `constant` keeps the peak, `sqrt` is one minus the root of the progress (Hägele
            et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").
        floor: the last learning rate as a fraction of the peak, between 0 and 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= warmup <= steps:
        raise ValueError(f"warmup must be between 0 and steps = {steps}, not {warmup}")
    if not 0 <= stable <= steps - warmup:
        raise ValueError(f"stable must be between 0 and steps - warmup = {steps - warmup}, not {stable}")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must be a fraction of the peak learning rate between 0 and 1, not {floor}")
    if decay not in _SHAPES:
        raise ValueError(f"decay must be one of {', '.join(_SHAPES)}, not {decay!r}")
    factor = WarmupAndDecay(warmup=warmup, stable=stable, steps=steps, decay=decay, floor=floor)
    return _StepSchedule(optimizer, factor)


class _StepSchedule(LambdaLR):
    """A schedule over all steps, also those whose update is skipped.

    Before its first step torch warns where the optimizer has not stepped yet. Then it takes the two calls to be in the
    wrong order, but here the first update was skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: WarmupAndDecay) -> None:
        self.stepped = False
        super().__init__(optimizer, factor)  # which calls `step` once
        self.stepped = False

    def step(self, epoch: int | None = None) -> None:
        """Go to the rates of the next step."""
        if self.stepped:
            super().step(epoch)
            return
        self.stepped = True
        # Only here: leaving this context makes Python forget which warnings it has shown, and show them again.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
            super().step(epoch)


_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Remaining share of the learning rate above the floor, given the completed share of the decay."""


@dataclass(frozen=True, kw_only=True)
class WarmupAndDecay:
    """The learning rate of a step as a share of its peak; the fields are those of `warmup_schedule`."""

    warmup: int
    stable: int
    steps: int
    decay: Decay
    floor: float

    def __call__(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        first = self.warmup + self.stable
        progress = min(1.0, max(0.0, (step - first) / max(1, self.steps - first)))
        return self.floor + (1.0 - self.floor) * _SHAPES[self.decay](progress)


def learning_rate(optimizer: torch.optim.Optimizer, scheduler: LambdaLR | None) -> float:
    """Return the rate of the next step, of parameters that have none of their own."""
    rate = float(optimizer.defaults["lr"])
    return rate if scheduler is None else rate * scheduler.lr_lambdas[0](scheduler.last_epoch)


def schedule_end(scheduler: LambdaLR) -> tuple[int, float] | None:
    """Return the steps after which a decayed learning rate stays, and that rate; None where it does not decay.

    The rate is that of parameters that have none of their own.
    """
    factor = scheduler.lr_lambdas[0]
    if not isinstance(factor, WarmupAndDecay) or factor.decay == "constant":
        return None
    return factor.steps, float(scheduler.optimizer.defaults["lr"]) * factor.floor


def set_schedule_step(scheduler: LambdaLR, step: int) -> None:
    """Advance a new schedule to where it is after `step` optimizer steps.

    The learning rate is a function of the step only, so no other state has to be saved, and a resumed run may have
    another number of parameter groups, or another schedule.
    """
    scheduler.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
