"""`schedule`: rules about the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import written
from legoai.dsl.analysis.training.schedule import decay_steps, floor_share, run_steps, warmup_steps
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.schedule import Constant, Wsd


class WarmupFits(Check):
    """A warm-up that is longer than the schedule.

    ## Example
    ```
    schedule cosine(warmup = 2000, steps = 1000)
    ```

    ## Use instead
    ```
    schedule cosine(warmup = 100, steps = 1000)
    ```
    """

    code = "LP691"
    slug = "warmup-too-long"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        form = analysis.plan.schedule.form
        if isinstance(form, Constant):
            return
        warmup, decay = warmup_steps(analysis.plan.schedule), decay_steps(analysis.plan.schedule)
        if isinstance(form, Wsd) and warmup <= form.steps < warmup + decay:
            yield self.at(
                analysis.span_of(form, "decay"),
                f"a warm-up of {warmup} steps and a decay of {decay} do not fit into {form.steps} steps",
                label=f"at most {form.steps - warmup}",
                others=[Label(analysis.span_of(form, "steps"), "the schedule ends here")],
                help=["`steps` counts warm-up and decay too"],
            )
        if warmup <= form.steps:
            return
        yield self.at(
            analysis.span_of(form, "warmup"),
            f"a warm-up of {warmup} steps does not fit into {form.steps} steps",
            label=f"at most {form.steps}",
            others=[Label(analysis.span_of(form, "steps"), "the schedule ends here")],
            help=["`steps` counts the warm-up too"],
        )


class NoDecay(Check):
    """A decay that never lowers the rate.

    With a floor of 1, or with a warm-up that takes all steps, `linear` and `cosine` are `constant`. So are they with a
    decay of one step: a decay begins at the full rate, and the floor comes after its last step.

    ## Example
    ```
    schedule cosine(warmup = 100, steps = 1000, floor = 1.0)
    ```

    ## Use instead
    ```
    schedule constant(warmup = 100)
    ```
    """

    code = "LP692"
    slug = "decay-without-effect"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        form, warmup, decay = plan.schedule.form, warmup_steps(plan.schedule), decay_steps(plan.schedule)
        if isinstance(form, Constant) or warmup > form.steps:
            return
        floor = "floor" if form.floor_lr is None else "floor_lr"
        steps = run_steps(plan)
        goes_on = steps is not None and steps > form.steps
        if floor_share(plan) == 1.0:
            field, why = floor, "its floor is the full rate"
        elif decay > 1 or (decay == 1 and goes_on):
            return
        elif decay == 1:
            field = "decay" if isinstance(form, Wsd) else "warmup" if warmup else "steps"
            why = "its decay has one step, which has the full rate"
        else:
            field = "decay" if isinstance(form, Wsd) else "warmup"
            why = "its decay has no step" if isinstance(form, Wsd) else "the warm-up takes all steps"
        yield self.at(
            analysis.span_of(form, field),
            f"`{form.name}` never lowers the learning rate: {why}",
            label="no decay",
            help=[f"write `constant(warmup = {warmup})`"],
        )


class NoWarmup(Check):
    """A warm-up that is given as a share of the steps, and is rounded to none.

    ## Example
    ```
    schedule cosine(warmup = 1%, steps = 40)
    ```

    ## Use instead
    ```
    schedule cosine(warmup = 5%, steps = 40)
    ```
    """

    code = "LP680"
    slug = "warmup-without-step"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        schedule = analysis.plan.schedule
        form = schedule.form
        if isinstance(form, Constant) or not form.warmup or warmup_steps(schedule) > 0:
            return
        yield self.at(
            analysis.span_of(form, "warmup"),
            f"a warm-up of {form.warmup * 100:.3g}% of {form.steps} steps is rounded to none",
            label="has no effect",
            others=[Label(analysis.span_of(form, "steps"), "all steps")],
            help=["give a number of steps or a larger share, or leave `warmup` out"],
        )


class FloorFits(Check):
    """A last learning rate that is given twice, or that is above the optimizer's.

    `floor` is a share of the optimizer's rate, `floor_lr` the rate itself.

    ## Example
    ```
    optimizer adamw(lr = 3e-4)
    schedule cosine(warmup = 100, steps = 1000, floor_lr = 3e-3)
    ```

    ## Use instead
    ```
    optimizer adamw(lr = 3e-4)
    schedule cosine(warmup = 100, steps = 1000, floor_lr = 3e-5)
    ```
    """

    code = "LP693"
    slug = "wrong-floor"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        form, algorithm = analysis.plan.schedule.form, analysis.plan.optimizer.algorithm
        if isinstance(form, Constant) or form.floor_lr is None:
            return
        if written(form, "floor"):
            yield self.at(
                analysis.span_of(form, "floor_lr"), "the last learning rate is given twice", label="given again",
                others=[Label(analysis.span_of(form, "floor"), "first given here")], help=["leave one of them out"],
            )  # fmt: skip
        if form.floor_lr > algorithm.lr:
            yield self.at(
                analysis.span_of(form, "floor_lr"),
                f"the last learning rate, {form.floor_lr:g}, is above the full one, {algorithm.lr:g}",
                label="above `lr`",
                others=[Label(analysis.span_of(algorithm, "lr"), "the full rate")],
                help=[f"`floor_lr` is a rate of at most {algorithm.lr:g}; `floor` is a share"],
            )
