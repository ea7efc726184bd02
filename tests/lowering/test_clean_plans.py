"""A plan without lint errors lowers, and each of its statements affects the program or gets a diagnostic.

The plans are drawn from the declarations of the directives (`drawn_plans.py`). `pytest -m slow -s` on this file draws
ten thousand and prints how many were clean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import Linted
from legoai.lowering.program import lower
from legoai.specs.directives.fsdp import Unit
from legoai.specs.models.manifests import load
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource
from support.texts.clean_plans import linted, repaired
from support.texts.drawn_plans import drawn_plans
from support.texts.plan_parts import DrawnPlan, Part

NOWHERE = Path("nowhere")
"""The folder of plans that name no file."""


def drawing(examples: int) -> settings:
    """Settings for the given number of deterministic examples without a deadline."""
    return settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(autouse=True)
def manifests_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests are read once for each preset, not once for each plan."""
    held: dict[str, Manifest] = {}
    read = load.load_manifest

    def load_once(source: ModelSource, **options: Any) -> Manifest:
        key = repr(source)
        if key not in held:
            held[key] = read(source, **options)
        return held[key]

    monkeypatch.setattr(load, "load_manifest", load_once)


def program(found: Linted) -> str:
    """The program without its hash and without comments, which name the plan's lines."""
    assert found.analysis is not None
    made = lower(found.analysis)
    compile(made.text, "drawn.py", "exec")
    return re.sub(r"  # .*", "", made.text.replace(made.digest, ""))


def check(plan: DrawnPlan, one: Callable[[list[Part]], Part]) -> bool:
    """Check one drawn plan and one part of it; False where the plan has errors."""
    plan, found = repaired(plan, NOWHERE, times=6)
    if found.has_errors:
        return False
    text = program(found)
    parts = list(plan.parts())
    if parts:
        part = one(parts)
        assert has_effect(found, text, part), f"{part.name} has no effect, and nothing says so:\n{plan.text()}"
    return True


def has_effect(found: Linted, text: str, part: Part) -> bool:
    """Whether a diagnostic is about the part, or the plan without it is another: in its program, or it has errors.

    A part that states a default, such as `stages = 2` on two ranks, has an effect if another value has one,
    or has a diagnostic that it has none.
    """
    if is_reported(found, part):
        return True
    without = linted(part.without, NOWHERE)
    assert found.analysis is not None
    if without.has_errors:
        return True
    assert without.analysis is not None
    if meaning(found.analysis) == meaning(without.analysis) or program(without) != text:
        return True
    others = (linted(other, NOWHERE) for other in part.instead)
    return any(other.has_errors or is_reported(other, part) or program(other) != text for other in others)


def is_reported(found: Linted, part: Part) -> bool:
    """Whether a diagnostic is about a part."""
    return any(item.label.span.line in (part.statement, *part.lines) for item in found.diagnostics)


def meaning(analysis: Analysis) -> list[object]:
    """Treatments of each module: equal where a part states a default."""
    found: list[object] = []
    for directive in analysis.plan.directives():
        options = [(item, getattr(directive, item.field)) for item in directive.options]
        changed = [(item.name, value) for item, value in options if item.required or value != item.default]
        rules = analysis.assigned(directive).by_path if directive.rules else {}
        said = {path: rule.treatment for path, rule in rules.items() if rule.treatment.name != "none"}
        if directive.keyword == "fsdp" and said.get("") in (Unit(), Unit(reshard="after_backward")):
            del said[""]  # the model itself is a unit without a rule as well
        if changed or said or directive.arguments or (directive.axes and directive.keyword != "shard"):
            found.append((directive.keyword, directive.axes, changed, said, dict(directive.arguments)))
    return found


@drawing(25)
@given(drawn_plans(), st.data())
def test_clean_plan_lowers_and_drops_nothing(plan: DrawnPlan, data: st.DataObject):
    check(plan, lambda parts: data.draw(st.sampled_from(parts)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_clean_plans_lower_and_drop_nothing():
    counts: Counter[str] = Counter()

    @drawing(10_000)
    @given(drawn_plans(), st.data())
    def drawn(plan: DrawnPlan, data: st.DataObject) -> None:
        counts["drawn"] += 1
        counts["clean"] += check(plan, lambda parts: data.draw(st.sampled_from(parts)))

    drawn()
    print(f"\n{counts['drawn']} plans, {counts['clean']} without errors, all of them lowered")
    assert counts["clean"] > counts["drawn"] / 4
