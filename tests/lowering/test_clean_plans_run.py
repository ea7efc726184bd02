"""A plan that lints clean takes a training step: its program runs on a small mesh, and its loss is finite.

The plans are drawn from the declarations of the directives (`drawn_plans.py`), on built-in models and on those of
Hugging Face, and are shrunken as `legoai verify` shrinks them. `pytest -m slow -s` on this file draws hundreds, and
prints how many were clean. Except for a few plans, compiled modules run
eagerly, since the compiler would take most of the time.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

import legoai.runtime.training.trainer  # noqa: F401  what torch registers once must not come with an inspected model
from legoai.lowering.verify.prepare import prepare
from legoai.lowering.verify.prepared import Prepared
from legoai.specs.models.reads import Images, ImagesWithTexts
from support.texts.clean_plans import clean_plans
from support.texts.drawn_plans import CONFIGS
from support.training.staged import train

RANKS = 4


def prepared_plans(examples: int, number: int) -> dict[str, Prepared]:
    """Clean plans among the given number of drawn ones, each with its small program; every second one in fp64."""
    plans = clean_plans(examples, number, unwanted=())
    return {
        plan.resolution.file.text: prepare(plan, directory=CONFIGS, ranks=RANKS, double=place % 2 == 0)
        for place, plan in enumerate(plans)
    }


def step(program: str, data: str, stance: str = "force_eager") -> list[float]:
    """The loss of one step of a program, uncompiled by default."""
    torch.compiler.set_stance(stance)
    try:
        return train(program, data, steps=1)["loss"]
    finally:
        torch.compiler.set_stance("default")


def take_a_step(plans: dict[str, Prepared], gloo, data: str, stance: str = "force_eager") -> None:
    """Run the plans, those of as many ranks after each other, since a pool of another size costs seconds.

    Raises:
        ExceptionGroup: of all plans that fail, each with its text in a note.
    """

    def ranks(item: tuple[str, Prepared]) -> int:
        return item[1].shrunken.plan.mesh.world_size

    failed = []
    for world, several in itertools.groupby(sorted(plans.items(), key=ranks), ranks):
        for text, prepared in several:
            given_data = "synthetic" if isinstance(prepared.reads, Images | ImagesWithTexts) else data
            try:
                losses = gloo(world)(step, prepared.program.text, given_data, stance)
                assert all(math.isfinite(loss) for [loss] in losses)
            except Exception as error:
                error.add_note(text)
                failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(plans)} plans fail", failed)


@pytest.fixture(scope="module")
def long_text(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(32 + (7 * place * place + place // 3) % 95) for place in range(60_000)))
    return str(path)


@pytest.mark.timeout(300)
def test_some_clean_plans_take_a_step(gloo, long_text):
    plans = prepared_plans(4, 2)
    assert len(plans) >= 2
    take_a_step(plans, gloo, long_text)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(2, 8))
def test_hundreds_of_clean_plans_take_a_step(number: int, gloo, long_text):
    plans = prepared_plans(250, number)
    print(f"\n{len(plans)} clean plans of 250")
    take_a_step(plans, gloo, long_text)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_some_clean_plans_take_a_compiled_step(gloo, long_text, monkeypatch):
    # The first compilation on a machine compiles headers too.
    monkeypatch.setattr("support.training.gloo.CALL_SECONDS", 900.0)
    plans = {text: plan for text, plan in prepared_plans(250, 1).items() if ".compile(" in plan.program.text}
    few = dict(itertools.islice(plans.items(), 12))
    print(f"\n{len(few)} compiled plans of {len(plans)}")
    assert len(few) >= 6
    take_a_step(few, gloo, long_text, "default")
