"""Worked plans with holes: their text is open, answered and not stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.question import solved_digest
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from support import ROOT

SOLVED = sorted((ROOT / "plans").glob("*_auto.plan"))


def opened(path: Path) -> OpenPlan:
    linted = lint(path.read_text(encoding="utf-8"), path.name, directory=path.parent)
    assert not linted.diagnostics  # LP904 would tell of a stale solution
    return OpenPlan(linted, directory=path.parent)


def test_solved_plans_exist():
    assert [path.stem for path in SOLVED] == ["llama3_70b_256_auto", "mixtral_8x7b_64_auto"]


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_holes_of_solved_plans_are_searchable_and_answered(path: Path):
    plan = opened(path)
    assert plan.refused == []
    assert len(plan.holes) >= 3
    for hole in plan.holes:
        assert hole.answer in hole.choices, hole.what


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_solution_digest_equals_its_plan(path: Path):
    resolution = resolve(path.read_text(encoding="utf-8"), path.name, directory=path.parent)
    assert resolution.plan is not None
    assert resolution.plan.solved is not None
    assert resolution.plan.solved.digest == solved_digest(resolution)
    assert resolution.plan.solved.gap == 0.0


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_solved_plan_has_model_and_scale_of_its_worked_plan(path: Path):
    worked = path.with_name(f"{path.stem.removesuffix('_auto')}.plan")
    one, other = (
        resolve(item.read_text(encoding="utf-8"), item.name, directory=item.parent).plan for item in (path, worked)
    )
    assert one is not None
    assert other is not None
    assert one.model == other.model
    assert one.mesh.world_size == other.mesh.world_size
    assert one.batch.global_batch == other.batch.global_batch
    assert [(item.metric, item.bound) for item in one.require] == [(item.metric, item.bound) for item in other.require]
