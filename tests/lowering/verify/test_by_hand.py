"""Programs of the worked plans, shrunken and started with torchrun as they were printed."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from legoai.lowering.verify.compare import TOLERANCES
from legoai.lowering.verify.prepare import prepare
from legoai.lowering.verify.prepared import Prepared
from legoai.specs.models.build import build_model
from legoai.specs.models.reads import Tokens
from support import ROOT

PLANS = ROOT / "plans"
MOST_RANKS = 8
WORKED = {
    "Llama 3 8B": ("llama3_8b_128", None),
    "Llama 3 8B, hybrid": ("llama3_8b_128", "hybrid"),
    "Llama 3.1 70B": ("llama3_70b_256", None),
    "Llama 3.1 405B": ("llama3_405b_512", None),
    "Llama 3.1 405B, long context": ("llama3_405b_512", "long_context"),
    "Mixtral 8x7B": ("mixtral_8x7b_64", None),
}


def shrunken(name: str, variant: str | None) -> Prepared:
    path = PLANS / f"{name}.plan"
    linted = lint(path.read_text(encoding="utf-8"), path.name, directory=PLANS, variant=variant)
    assert not linted.has_errors
    return prepare(linted, directory=PLANS, ranks=MOST_RANKS)


def started(program: str, world: int, folder: Path) -> list[float]:
    """The losses of two steps of a program that torchrun has started."""
    (folder / "program.py").write_text(program)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "program.py",
        "--steps", "2", "--data", "text.txt", "--device", "cpu", "--out", "run", "--log-every", "0",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    events = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if "loss" in event]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKED)
def test_worked_program_under_torchrun_equals_one_device(name: str, tmp_path: Path):
    plan_name, variant = WORKED[name]
    prepared = shrunken(plan_name, variant)
    plan, program = prepared.shrunken.plan, prepared.program
    world = plan.mesh.world_size
    assert 2 <= world <= MOST_RANKS
    assert re.search(rf"^Start it with: torchrun --nproc-per-node {world} ", program.text, re.MULTILINE)
    assert len(program.text.splitlines()) <= 300, "too long to review in one sitting"
    text = "".join(chr(32 + (7 * place * place + place // 3) % 95) for place in range(40_000))
    (tmp_path / "text.txt").write_text(text)
    losses = started(program.text, world, tmp_path)
    from legoai.lowering.verify.one_device import train  # after the processes: it computes, and imports torch

    build = functools.partial(build_model, plan.model.source(), PLANS)
    text = str(tmp_path / "text.txt")
    alone = train(plan, build, Tokens(), data=text, steps=2, seed=0, tell=lambda _: None)["losses"]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert losses == pytest.approx(alone, rel=TOLERANCES["fp64"].loss)
