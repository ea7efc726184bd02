"""A damaged plan gives diagnostics or a plan, never an exception: each plan is damaged hundreds of times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from legoai.dsl.formatting.edit import holes
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.lint import lint
from legoai.dsl.reporting.output import render_full
from legoai.specs.models.manifests import cache as manifest_cache
from legoai.specs.models.manifests import manifest
from legoai.specs.models.source import ModelSource
from support import VALID_PLANS, WORKED_PLANS
from support.marks import some_slow
from support.texts import strategies as some

PLANS = WORKED_PLANS + VALID_PLANS


@pytest.fixture(autouse=True)
def _only_computed_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other model is inspected."""

    def refuse(source: ModelSource, **_: object) -> None:
        raise manifest.ManifestError("inspection_failed", f"{source} is not inspected in this test")

    monkeypatch.setattr(manifest_cache, "cached_or_inspected", refuse)


@pytest.mark.parametrize("times", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", some_slow(PLANS, *WORKED_PLANS[::2]), ids=lambda path: path.stem)
def test_mutated_plan_never_makes_lint_raise(path: Path, times: int):
    text = path.read_text(encoding="utf-8")
    chance = random.Random(f"{path.stem} {times}")
    clean = 0
    for number in range(times):
        damaged = some.damage(text, chance)
        found = lint(damaged, path.name, directory=path.parent, variants=number % 4 == 0)
        assert found.diagnostics or found.plan is not None, damaged
        clean += not found.diagnostics
        for item in found.diagnostics:
            file = found.files[item.label.span.file]
            assert 0 <= item.label.span.start <= item.label.span.end <= len(file.text) + 1, damaged
        if number % 10 == 0:
            assert render_full(found.diagnostics, found.files) or not found.diagnostics
            result = format_text(damaged, path.name)
            assert (result.text is None) == bool(result.diagnostics)
            list(holes(found.resolution.file))
    assert clean < times / 2, "the damage is too small to prove anything"
