"""Estimates of random plans on GPUs: shortened captures equal whole ones, and are deterministic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legoai.cost.estimate import CannotEstimateError, Estimate, estimate
from legoai.dsl.lint import Linted
from legoai.lowering.program import lower
from support.simulation.simulated import in_a_fork
from support.texts.clean_plans import clean_plans
from support.texts.drawn_plans import CONFIGS
from support.texts.plan_parts import Called, DrawnPlan

MOST_RANKS = 16
NOT_CAPTURED = (
    "[LP636]",  # CUDA graphs of units, of which lint warns
    "[LP637]",  # compiled experts in another dtype than bf16
)


def on_h100s(plan: DrawnPlan) -> DrawnPlan:
    """The plan on GPUs whose speed is known."""
    changed = [
        replace(item, subject=Called("h100_sxm", item.subject.options))
        if item.keyword == "cluster" and isinstance(item.subject, Called)
        else item
        for item in plan.statements
    ]
    return DrawnPlan(tuple(changed))


def figures(found: Estimate) -> tuple[float, ...]:
    return (found.step_time, found.peak_active, found.peak_reserved)


def estimated(linted: Linted) -> list[tuple[float, ...]]:
    """Whole, again, and with equal blocks and micro batches timed a few times; nothing where it is refused."""
    analysis = linted.analysis
    assert analysis is not None
    program, manifest = lower(analysis), analysis.manifest
    assert manifest is not None
    try:
        return [
            figures(estimate(program, analysis.plan, manifest, directory=CONFIGS, whole=whole))
            for whole in (True, True, False)
        ]
    except CannotEstimateError as error:
        assert any(known in str(error) for known in NOT_CAPTURED), error
        return []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(201, 203))
def test_estimates_of_random_plans_equal_full_simulation(number: int):
    failed = []
    plans = [plan for plan in clean_plans(60, number, on_h100s) if plan.plan.mesh.world_size <= MOST_RANKS]
    for plan in plans:
        try:
            found = in_a_fork(estimated, plan)
            if found:
                whole, again, few = found
                assert again == whole
                assert few[1:] == whole[1:]
                assert few[0] == pytest.approx(whole[0], rel=5e-3)
        except Exception as error:
            error.add_note(plan.resolution.file.text)
            failed.append(error)
    print(f"\n{len(plans)} plans estimated")
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(plans)} plans", failed)
