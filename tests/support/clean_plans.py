"""Drawn plans without errors, and the drawing of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings

from legoai.dsl.lint import Linted, lint
from support.drawn_plans import CONFIGS, drawn_plans
from support.plan_parts import DrawnPlan

NO_OPERATOR = '"some.file"'
"""A drawn text that no operator has for its name: lint does not import torch, and leaves that to the run."""
_BECOMES_NAN = "LP683"


def linted(plan: DrawnPlan) -> Linted:
    return lint(plan.text(), "drawn.plan", directory=CONFIGS)


def repaired(plan: DrawnPlan) -> tuple[DrawnPlan, Linted]:
    """The plan without the parts in which lint finds errors."""
    found = linted(plan)
    for _ in range(12):
        wrong = {item.label.span.line for item in found.diagnostics if item.severity == "error"}
        less = plan.without_lines(wrong)
        if less is None:
            break
        plan, found = less, linted(less)
    return plan, found


def clean_plans(
    examples: int, number: int, change: Callable[[DrawnPlan], DrawnPlan] = lambda plan: plan
) -> list[Linted]:
    """Different plans without errors among so many drawn ones; of none lint says that its parameters become NaN."""
    found: dict[str, Linted] = {}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(drawn_plans(foreign=True))
    def draw(drawn: DrawnPlan) -> None:
        plan, clean = repaired(change(drawn))
        text, codes = plan.text(), {item.code for item in clean.diagnostics}
        if not clean.has_errors and NO_OPERATOR not in text and _BECOMES_NAN not in codes:
            found[text] = clean

    draw()
    return list(found.values())
