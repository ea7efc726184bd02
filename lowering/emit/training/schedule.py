"""`schedule`: the learning rate over the steps."""

from __future__ import annotations

from legoai.dsl.analysis.training.schedule import decay_shape, stable_steps, warmup_steps
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Function, Line, call, literal, quoted
from legoai.specs.directives.schedule import Constant, Wsd


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_lr_scheduler`, unless the rate is constant, and the number of steps where the schedule has one."""
    schedule = lowering.plan.schedule
    form = schedule.form
    note = lowering.note(schedule)
    stable: str | None = None
    if isinstance(form, Constant):
        if form.warmup == 0:
            return
        steps, floor = form.warmup, None
    else:
        steps = form.steps
        floor = lowering.number(form, "floor")
        if form.floor_lr is not None and lowering.plan.optimizer.algorithm.lr > 0.0:
            floor = f"{lowering.number(form, 'floor_lr')} / {lowering.number(lowering.plan.optimizer.algorithm, 'lr')}"
        if isinstance(form, Wsd):
            stable = literal(stable_steps(schedule))
        draft.train_with("steps", literal(steps), note)
    draft.imports.module("torch")
    draft.imports.name("legoai.runtime", "warmup_schedule")
    draft.imports.name("torch.optim.lr_scheduler", "LambdaLR")
    made = call(
        "warmup_schedule",
        "optimizer",
        warmup=literal(warmup_steps(schedule)),
        stable=stable,
        steps=literal(steps),
        decay=quoted(decay_shape(schedule)),
        floor=floor,
    )
    draft.later_functions.append(
        Function("build_lr_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR", (Line(made, "return ", note),))
    )
    draft.train_with("build_lr_scheduler", "build_lr_scheduler")
    draft.step.after_update.append(Line("training.scheduler.step()", "", note))
