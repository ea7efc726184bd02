"""Learning rates of a training in the steps of its whole schedule, compared with those of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from legoai.dsl.analysis.training.schedule import decay_steps, stable_steps, warmup_steps
from legoai.runtime.initialize import plain_path
from legoai.runtime.training.state import Training
from legoai.specs.directives.schedule import Schedule

_MOST: Final = 1000
_CONSTANT: Final = 10_000
_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RateDifference:
    """A step in which a parameter has another learning rate than the plan says.

    Attributes:
        step: counted from 1.
        name: of the parameter.
        own: the program's rate.
        wanted: the plan's.
    """

    step: int
    name: str
    own: float
    wanted: float


def steps_of_schedule(schedule: Schedule, trained: int) -> list[int]:
    """Return the steps in which rates are compared, counted from 0.

    These are the trained ones, those around the borders of the phases, and others evenly spread over twice the
    schedule's length.

    Args:
        schedule: of the plan.
        trained: number of steps that are trained.
    """
    stable = warmup_steps(schedule)
    decay = stable + stable_steps(schedule)
    end = decay + decay_steps(schedule)
    borders = {border + apart for border in (stable, decay, end) for apart in (-1, 0, 1)}
    last = 2 * end if decay_steps(schedule) else end + _CONSTANT
    found = {*range(trained), *borders, *range(0, last, max(1, last // _MOST)), last}
    return sorted(step for step in found if step >= 0)


def current_rates(training: Training) -> list[float]:
    """Return the learning rate of each group of parameters."""
    return [float(group["lr"]) for group in training.optimizer.param_groups]


def wrong_rates(
    training: Training, seen: Sequence[Sequence[float]], reference: Mapping[str, Any]
) -> list[RateDifference]:
    """Compare a rank's learning rates with the plan's; return the first difference of each step that has one.

    Args:
        training: of the rank.
        seen: its rates in the steps that were trained.
        reference: the `steps` in which rates are compared, the plan's `factors` in these, and the `base` rate of each
            parameter by name.
    """
    found = []
    base: Mapping[str, float] = reference["base"]
    groups = [[name for name in names if name in base] for names in _names(training)]
    for step, factor in zip(reference["steps"], reference["factors"], strict=True):
        rates = seen[step] if step < len(seen) else _scheduled(training, step)
        for names, rate in zip(groups, rates, strict=True):
            other = next((it for it in names if abs(rate - base[it] * factor) > _TOLERANCE * base[it]), None)
            if other is not None:
                found.append(RateDifference(step=step + 1, name=other, own=rate, wanted=base[other] * factor))
                break
    return found


def merged(found: Iterable[Iterable[RateDifference]]) -> tuple[RateDifference, ...]:
    """Return one difference of each step in which a rank has one."""
    by_step: dict[int, RateDifference] = {}
    for rank in found:
        for item in rank:
            by_step.setdefault(item.step, item)
    return tuple(by_step[step] for step in sorted(by_step))


def _scheduled(training: Training, step: int) -> list[float]:
    """Return the rates that the schedule gives the groups of an optimizer in a step."""
    scheduler = training.scheduler
    if scheduler is None:
        return current_rates(training)
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    return [float(base) * factor(step) for base, factor in pairs]


def _names(training: Training) -> list[list[str]]:
    """Return the names of the parameters of each group."""
    names = {id(parameter): plain_path(name) for name, parameter in training.model.named_parameters()}
    groups = training.optimizer.param_groups
    return [[names[id(parameter)] for parameter in group["params"] if id(parameter) in names] for group in groups]
