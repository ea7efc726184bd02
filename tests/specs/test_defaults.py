"""A plan's hash depends on its values beyond the defaults, and on the defaults' version."""

import json
from pathlib import Path

import pytest

from legoai.dsl.frontend.resolve import resolve
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import Declared, Option, describe
from legoai.specs.directives.clip import Clip
from legoai.specs.directives.kinds import Boolean
from legoai.specs.plan import DEFAULTS

RECORDED = Path(__file__).with_name("defaults.json")
PLANS = Path(__file__).parents[2] / "plans"


def declared_defaults() -> dict[str, dict[str, object]]:
    """The default of every option, by statement or by statement and treatment."""
    found: dict[str, dict[str, object]] = {}

    def add(name: str, declared: type[Declared]) -> None:
        found[name] = {item.name: describe(item.default) for item in declared.options if not item.required}

    for keyword in FAMILIES:
        add(keyword, family(keyword))
        for treatment in treatments_of(family(keyword)):
            add(f"{keyword}: {treatment.name}", treatment)
    return found


def treatments_of(declared: type[Declared]):
    kinds = [item.kind for item in declared.options]
    kinds += [declared.treatments] if getattr(declared, "treatments", None) is not None else []
    for kind in kinds:
        for inner in (kind, *getattr(kind, "kinds", ())):
            for treatment in getattr(inner, "treatments", ()):
                yield treatment
                yield from treatments_of(treatment)


def test_changed_default_requires_a_new_version():
    """Add a new option's default to the file; when a default changes, write it there and raise DEFAULTS."""
    recorded = json.loads(RECORDED.read_text())
    now = json.loads(json.dumps(declared_defaults()))
    assert recorded == {"version": DEFAULTS, "defaults": now}


def plan_of(text: str):
    plan = resolve(text, "tiny.plan", directory=PLANS).plan
    assert plan is not None
    return plan


TINY = (PLANS / "tiny.plan").read_text()


def test_explicit_default_keeps_the_digest():
    assert plan_of(TINY + "attention (kernel = default)\n").digest == plan_of(TINY).digest
    assert (
        plan_of(TINY.replace("fsdp on dp_shard {", "fsdp on dp_shard (backend = eager) {")).digest
        == plan_of(TINY).digest
    )


def test_other_value_changes_the_digest():
    assert plan_of(TINY.replace("norm = 1.0", "norm = 2.0")).digest != plan_of(TINY).digest


def test_meaningful_bare_statement_changes_the_digest():
    assert plan_of(TINY + "pipeline on pp\n").digest != plan_of(TINY).digest
    assert plan_of(TINY + "comm\n").digest == plan_of(TINY).digest  # as one without it is carried out too


def test_new_option_keeps_the_digest_of_plans_without_it(monkeypatch: pytest.MonkeyPatch):
    before = plan_of(TINY).digest
    added = Option(Boolean(), "Whether a test added it.", False, None)
    added.__set_name__(Clip, "added")
    monkeypatch.setattr(Clip, "options", (*Clip.options, added))
    assert plan_of(TINY).digest == before
    assert plan_of(TINY.replace("norm = 1.0", "norm = 1.0, added = true")).digest != before
