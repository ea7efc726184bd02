"""Facts about the learning-rate schedule: steps of its phases, and its last rate as a share of the full one."""

from __future__ import annotations

from legoai.specs.directives.schedule import Constant, Schedule, Wsd
from legoai.specs.plan import Plan


def _steps(value: int | float, whole: int) -> int:
    """A number of steps, where a share of all steps is rounded to a number."""
    return round(value * whole) if isinstance(value, float) else value


def warmup_steps(schedule: Schedule) -> int:
    """Steps of the warm-up."""
    form = schedule.form
    return form.warmup if isinstance(form, Constant) else _steps(form.warmup, form.steps)


def decay_steps(schedule: Schedule) -> int:
    """Steps of the decay; 0 of a constant rate."""
    form = schedule.form
    if isinstance(form, Constant):
        return 0
    return _steps(form.decay, form.steps) if isinstance(form, Wsd) else form.steps - warmup_steps(schedule)


def stable_steps(schedule: Schedule) -> int:
    """Steps at the full rate between warm-up and decay."""
    form = schedule.form
    return 0 if isinstance(form, Constant) else form.steps - warmup_steps(schedule) - decay_steps(schedule)


def run_steps(plan: Plan) -> int | None:
    """Optimizer steps of a run: those of `steps`, or else of the schedule; None where the command line decides."""
    if plan.steps is not None:
        return plan.steps.count
    form = plan.schedule.form
    return None if isinstance(form, Constant) else form.steps


def floor_share(plan: Plan) -> float:
    """The last learning rate as a share of the full one."""
    form, rate = plan.schedule.form, plan.optimizer.algorithm.lr
    if isinstance(form, Constant):
        return 1.0
    if form.floor_lr is None:
        return form.floor
    return form.floor_lr / rate if rate else 0.0


def decay_shape(schedule: Schedule) -> str:
    """The form of the decay: `constant`, `linear`, `cosine` or `sqrt`."""
    form = schedule.form
    return form.shape if isinstance(form, Wsd) else form.name
