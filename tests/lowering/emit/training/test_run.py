"""A plan's statements about its run are the trainer's defaults, which the command line overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from legoai.lowering.emit.training.run import planned
from legoai.runtime.launching.options import PLANNED, parse_options
from support.texts.plans import lowered, resolved

PLAN = """plan a
model llama3("tiny")
cluster cpu
batch (global = 4, micro = 1, seq_len = 64)
schedule cosine(steps = 100)
"""
RUN = """data (source = "texts.jsonl", field = "body")
weights (huggingface = "published")
steps 40
seed 7
save (every = 10, keep = 0)
evaluate (every = 5, batches = 2)
"""


def options(text: str, *argv: str) -> tuple[Any, Any]:
    program: dict[str, Any] = {"__name__": "lowered"}
    exec(lowered(text).text, program)
    trainer = program["trainer"]()
    return trainer, parse_options(argv, plan="a", **{name: getattr(trainer, name) for name in PLANNED})


def test_plan_sets_command_line_defaults():
    trainer, found = options(PLAN + RUN)
    assert (found.data, found.data_field, found.steps) == ("texts.jsonl", "body", 40)
    assert (found.save_every, found.keep) == (10, 0)
    assert (found.evaluate_every, found.evaluate_batches) == (5, 2)
    assert (trainer.seed, found.seed) == (7, None)


def test_command_line_overrides_the_plan():
    _, found = options(PLAN + RUN, "--steps", "3", "--data", "python", "--keep", "2", "--evaluate-every", "0")
    assert (found.steps, found.data, found.keep, found.evaluate_every) == (3, "python", 2, 0)
    assert found.save_every == 10


def test_initial_weights_of_the_plan_can_be_overridden():
    assert options(PLAN + RUN)[1].load_weights == Path("published")
    assert options(PLAN + RUN, "--load-weights", "other")[1].load_weights == Path("other")
    assert options(PLAN + RUN, "--load-weights", "none")[1].load_weights is None
    assert options(PLAN)[1].load_weights is None


def test_asynchronous_checkpoints_follow_plan_or_command_line():
    asynchronous = RUN.replace("keep = 0", "keep = 0, asynchronous = true")
    assert [options(PLAN + text)[1].save_async for text in (RUN, asynchronous)] == [False, True]
    assert options(PLAN + RUN, "--save-async")[1].save_async
    assert not options(PLAN + asynchronous, "--no-save-async")[1].save_async


def test_without_statements_trainer_defaults_apply():
    _, found = options(PLAN)
    assert (found.steps, found.data, found.save_every, found.keep, found.evaluate_every) == (
        100,
        "python",
        0,
        3,
        0,
    )


def test_model_of_images_is_trained_on_made_ones_by_default():
    images = """plan a
model vit("tiny")
cluster cpu
batch (global = 4, micro = 1)
"""
    assert options(images)[1].data == "synthetic"
    assert 'data="synthetic",  # tiny.plan:2' in lowered(images).text
    assert options(images, "--data", "python")[1].data == "python"


@pytest.mark.parametrize("text", [PLAN, PLAN + RUN, PLAN.replace("cosine(steps = 100)", "constant(warmup = 5)")])
def test_planned_run_settings_equal_the_program(text: str):
    trainer, _ = options(text)
    decided = planned(resolved(text))
    assert {name: getattr(trainer, name) for name in decided} == decided
    assert set(decided) <= {*PLANNED, "seed"}
    if "steps 40" in text:
        assert set(decided) == {*PLANNED, "seed"}
