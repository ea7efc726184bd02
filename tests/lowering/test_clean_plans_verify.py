"""A plan that lints clean trains as one device does: losses, gradients and updates of drawn plans, in fp64.

Comparisons and tolerances are those of `legoai verify`. `pytest -m slow -s` on this file prints how
many plans were compared.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import legoai.runtime.training.trainer  # noqa: F401  what torch registers once must not come with an inspected model
from legoai.lowering.verify import run
from legoai.lowering.verify.prepare import Prepared, prepare
from legoai.specs.models.reads import Images, ImagesWithTexts, Tokens
from support.clean_plans import clean_plans
from support.drawn_plans import CONFIGS

RANKS = 4
STEPS = 2


def one_device(job: tuple[Any, ...]) -> dict[str, Any]:
    return run._OneDevice(*job)(lambda _: None, lambda: None)


def rank(job: tuple[Any, ...], reference: str) -> dict[str, Any]:
    """Result of one rank of the uncompiled program, in an existing process group."""
    run._group = lambda *_: contextlib.nullcontext()
    torch.compiler.set_stance("force_eager")
    try:
        return run._Rank(dist.get_rank(), *job)(lambda _: None, lambda: reference)
    finally:
        torch.compiler.set_stance("default")


def verdict(prepared: Prepared, gloo, folder: Path) -> run.Verdict:
    plan, reads = prepared.shrunken.plan, prepared.reads or Tokens()
    data = run.SYNTHETIC
    if not isinstance(reads, Images | ImagesWithTexts):
        file = folder / "text.txt"
        file.write_text(run._text(plan, reads, STEPS), encoding="ascii")
        data = str(file)
    [reference] = gloo(1)(one_device, (plan, reads, data, folder, STEPS, CONFIGS))
    world, traced = plan.mesh.world_size, plan.fsdp is not None and plan.fsdp.backend == "graph"
    looks = plan.compile is None and (plan.fsdp is not None or plan.replicate is not None)
    job = (world, prepared.program.text, data, folder, STEPS, CONFIGS, looks, traced, plan.clip is not None)
    return run._verdict(plan, gloo(world)(rank, job, reference["file"]), reference)


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
