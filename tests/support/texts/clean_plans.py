"""Drawn plans without errors, and the drawing of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from legoai.dsl.lint import Linted, lint
from support.texts.drawn_plans import CONFIGS, drawn_plans
from support.texts.plan_parts import DrawnPlan

NO_OPERATOR = '"some.file"'
"""A drawn text that no operator has for its name: lint does not import torch, and leaves that to the run."""
BECOMES_NAN = "LP683"


def linted(plan: DrawnPlan, directory: Path = CONFIGS) -> Linted:
    return lint(plan.text(), "drawn.plan", directory=directory)


def repaired(plan: DrawnPlan, directory: Path = CONFIGS, *, times: int = 12) -> tuple[DrawnPlan, Linted]:
    """The plan without the parts in which lint finds errors, after at most the given number of rounds."""
    found = linted(plan, directory)
    for _ in range(times):
        wrong = {item.label.span.line for item in found.diagnostics if item.severity == "error"}
        less = plan.without_lines(wrong)
        if less is None:
            break
        plan, found = less, linted(less, directory)
    return plan, found


def clean_plans(
    examples: int,
    number: int,
    change: Callable[[DrawnPlan], DrawnPlan] = lambda plan: plan,
    *,
    unwanted: Collection[str] = (BECOMES_NAN,),
) -> list[Linted]:
    """Different plans without errors, and without unwanted diagnostics, among the given number of drawn ones."""
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
        text, wrong = plan.text(), any(item.code in unwanted for item in clean.diagnostics)
        if not clean.has_errors and NO_OPERATOR not in text and not wrong:
            found[text] = clean

    draw()
    return list(found.values())
