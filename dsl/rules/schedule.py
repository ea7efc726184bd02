"""`schedule`: rules about the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.schedule import Constant


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
        if isinstance(form, Constant) or form.warmup <= form.steps:
            return
        yield self.at(
            analysis.place(form, "warmup"),
            f"a warm-up of {form.warmup} steps does not fit into {form.steps} steps",
            label=f"at most {form.steps}",
            others=[Label(analysis.place(form, "steps"), "the schedule ends here")],
            help=["`steps` counts the warm-up too"],
        )


class NoDecay(Check):
    """A decay that never lowers the rate.

    With a floor of 1, or with a warm-up that takes all steps, `linear` and `cosine` are `constant`.

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
        form = analysis.plan.schedule.form
        if isinstance(form, Constant) or form.warmup > form.steps:
            return
        field = "floor" if form.floor == 1.0 else "warmup"
        if field == "warmup" and form.warmup < form.steps:
            return
        why = "its floor is the full rate" if field == "floor" else "the warm-up takes all steps"
        yield self.at(
            analysis.place(form, field),
            f"`{form.name}` never lowers the learning rate: {why}",
            label="no decay",
            help=[f"write `constant(warmup = {form.warmup})`"],
        )
