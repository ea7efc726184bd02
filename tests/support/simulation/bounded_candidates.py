"""Drawn candidates whose bounds are compared with their simulations."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.shared_work import shared_key, work_of_micro_batch
from legoai.cost.search.stages.costs import work_of_stages
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower


def bounded_wrongly(text: str, directory: Path, count: int, seed: int) -> list[str]:
    """Return drawn candidates of a plan whose bounds exceed their simulation; each simulation informs the next bounds.

    Args:
        text: of the plan, which has holes.
        directory: of its model.
        count: candidates that are simulated, of which some plans have fewer.
        seed: of the order in which they are drawn.
    """
    linted = lint(text, "test.plan", directory=directory)
    assert not linted.has_errors, linted.diagnostics
    plan, bounds = OpenPlan(linted, directory=directory), BoundsOf()
    every = list(itertools.product(*(range(len(hole.choices)) for hole in plan.holes)))
    random.Random(seed).shuffle(every)
    wrong, done = [], 0
    split_bounds: dict[tuple[int, ...], float] = {}
    fastest: dict[tuple[int, ...], float] = {}
    least_of: dict[tuple[int, ...], float] = {}
    for choices in every:
        candidate = plan.candidate(choices)
        if candidate.errors:
            continue
        found = estimate(lower(candidate.analysis), candidate.plan, candidate.analysis.manifest, directory=directory)
        least, manifest = bounds(candidate.analysis), candidate.analysis.manifest
        work, shared = work_of_micro_batch(found, manifest), bounds.shared
        key = shared_key(candidate.analysis)
        if candidate.plan.pipeline is None and shared.computed.get(key, work.computed) != pytest.approx(work.computed):
            wrong.append(f"{choices}: a micro batch computes {work.computed} s, and {shared.computed[key]} elsewhere")
        stages = work_of_stages(found, manifest)
        shared.observe(candidate.analysis, work)
        shared.observe_blocks(candidate.analysis, stages.least)
        if least.step_time > found.step_time or least.memory > found.peak_active or least.step_time <= 0.0:
            wrong.append(f"{choices}: {least} against {found.step_time} s and {found.peak_active} bytes")
        others = tuple(index for hole, index in zip(plan.holes, choices, strict=True) if hole.what != "pipeline split")
        split_bounds[others] = max(split_bounds.get(others, 0.0), bounds.of_every_split(candidate.analysis, stages))
        fastest[others] = min(fastest.get(others, math.inf), found.step_time)
        if split_bounds[others] > fastest[others]:
            wrong.append(f"{choices}: {split_bounds[others]} of every split, of which one takes {fastest[others]} s")
        memory = ("fsdp", "checkpoint", "offload")
        beside = tuple(
            index for hole, index in zip(plan.holes, choices, strict=True) if hole.what.split()[0] not in memory
        )
        fewest = least_of[beside] = min(least_of.get(beside, math.inf), found.step_time)
        left_open = [
            None if hole.what.split()[0] in memory else index for hole, index in zip(plan.holes, choices, strict=True)
        ]
        if bounds.whatever_is_recomputed(candidate.analysis, plan.candidate(left_open).analysis, stages) > fewest:
            wrong.append(f"{choices}: a bound of all treatments is above {fewest} s")
        done += 1
        if done == count:
            break
    assert done == count or done >= 8
    return wrong
