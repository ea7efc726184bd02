"""What a plan says about its run is what the trainer does, unless the command line says otherwise."""

from __future__ import annotations

from typing import Any

from legoai.runtime.options import PLANNED, parse_options
from support.plans import lowered

PLAN = """plan a
model llama3("tiny")
cluster cpu
batch (global = 4, micro = 1, seq_len = 64)
schedule cosine(steps = 100)
"""
RUN = """data (source = "texts.jsonl", field = "body")
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


def test_a_plan_decides_the_defaults_of_the_command_line():
    trainer, found = options(PLAN + RUN)
    assert (found.data, found.data_field, found.steps) == ("texts.jsonl", "body", 40)
    assert (found.checkpoint_every, found.keep) == (10, 0)
    assert (found.validate_every, found.validate_batches) == (5, 2)
    assert (trainer.seed, found.seed) == (7, None)


def test_the_command_line_wins():
    _, found = options(PLAN + RUN, "--steps", "3", "--data", "python", "--keep", "2", "--validate-every", "0")
    assert (found.steps, found.data, found.keep, found.validate_every) == (3, "python", 2, 0)
    assert found.checkpoint_every == 10


def test_without_statements_the_trainer_decides():
    _, found = options(PLAN)
    assert (found.steps, found.data, found.checkpoint_every, found.keep, found.validate_every) == (
        100,
        "python",
        0,
        3,
        0,
    )
