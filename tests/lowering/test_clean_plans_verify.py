"""A plan that lints clean trains as one device does: losses, gradients and updates of drawn plans, in fp64.

Comparisons and tolerances are those of `legoai verify`. `pytest -m slow -s` on this file prints how
many plans were compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import legoai.runtime.training.trainer  # noqa: F401  what torch registers once must not come with an inspected model
from legoai.lowering.verify import run
from legoai.lowering.verify.prepare import prepare
from legoai.lowering.verify.prepared import Prepared
from support.texts.clean_plans import clean_plans
from support.texts.drawn_plans import CONFIGS

RANKS = 4
STEPS = 2


def one_device(jobs: Mapping[str, Any]) -> dict[str, Any]:
    return jobs[run.ONE_DEVICE](lambda _: None, lambda: None)


def rank(jobs: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """Result of one rank of the uncompiled program, in an existing process group."""
    run._group = lambda *_: contextlib.nullcontext()
    torch.compiler.set_stance("force_eager")
    try:
        return jobs[f"rank {dist.get_rank()}"](lambda _: None, lambda: reference)
    finally:
        torch.compiler.set_stance("default")


def verdict(prepared: Prepared, gloo, folder: Path) -> run.Verdict:
    plan = prepared.shrunken.plan
    jobs = run.jobs_of(prepared, directory=CONFIGS, steps=STEPS, folder=folder)
    [reference] = gloo(1)(one_device, jobs)
    return run.verdict(plan, gloo(plan.mesh.world_size)(rank, jobs, reference["file"]), reference)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(101, 105))
def test_clean_plans_equal_one_device(number: int, gloo, tmp_path: Path):
    plans = [(plan, prepare(plan, directory=CONFIGS, ranks=RANKS)) for plan in clean_plans(120, number)]
    failed = []
    plans.sort(key=lambda item: item[1].shrunken.plan.mesh.world_size)
    for place, (plan, prepared) in enumerate(plans):
        folder = tmp_path / str(place)
        folder.mkdir()
        try:
            found = verdict(prepared, gloo, folder)
            assert found.equal, (found.losses, found.norms, found.first, found.wrong_samples, found.wrong_reductions)
        except Exception as error:
            error.add_note(plan.resolution.file.text)
            failed.append(error)
    print(f"\n{len(plans)} plans compared")
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(plans)} plans differ or fail", failed)
