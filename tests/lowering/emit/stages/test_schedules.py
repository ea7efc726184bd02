"""Every checkpointing and every compilation under every schedule trains as one process does, or a rule refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legoai.dsl.lint import lint
from legoai.specs.directives.pipeline import SPLIT_BACKWARD
from support.marks import NEEDS_SOLVER
from support.texts.plans import HEAD
from support.training.staged import (
    PLAIN_DOUBLE,
    SCHEDULES,
    TOLERANCE,
    TRAINING,
    assert_close,
    text_of,
    together,
    train,
)

MODES = {
    "none": "layers.* = none",
    "full": "layers.* = full",
    "every": "layers.* = every(2)",
    "selective": "layers.* = selective([attention, alternate_matmul])",
    "budget": "layers.* = budget(40%)",
    "integer program": "layers.* = budget(40%, by = ilp)",
}
CHOOSING = ("selective", "budget", "integer program")
MARKS = {"integer program": NEEDS_SOLVER}
MIXED = "checkpoint { layers.0 = selective([attention, matmul]), layers.1 = budget(40%), layers.2 = full }\n"
BACKENDS = ("aot_eager", "inductor")


def staged(schedule: str, rest: str) -> str:
    return f"mesh (pp = 2)\npipeline on pp (schedule = {schedule})\n{rest}{PLAIN_DOUBLE}"


def errors(body: str) -> set[str]:
    """The codes of the errors that lint finds in a plan."""
    found = lint(
        f"{HEAD.replace('devices = 4', 'devices = 2')}{TRAINING}{body}", "tiny.plan", directory=Path()
    ).diagnostics
    return {item.code for item in found if item.severity == "error"}


def train_anew(text: str, data: str) -> dict:
    torch._dynamo.reset()  # compilations of other tests in this process count as recompilation
    return train(text, data, evaluate_every=2, evaluate_batches=4)


def wrong(gloo, text: str, data: str, unstaged: dict) -> str:
    """Failure of a program to train as one process does; empty for none."""
    try:
        results = gloo(2)(train_anew, text, data)
    except Exception as error:
        gloo(2).close()  # ranks that were left waiting for each other
        return f"raises {type(error).__name__}: {error}"
    try:
        assert_close(together(results), unstaged, TOLERANCE)
    except AssertionError as error:
        return f"differs: {error}"
    return ""


def test_all_treatments_in_one_pipeline_equal_one_process(gloo, data, unstaged):
    body = staged("1F1B", MIXED)
    assert errors(body) == set()
    assert wrong(gloo, text_of(body), data, unstaged) == ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", [pytest.param(name, marks=MARKS.get(name, ())) for name in MODES])
def test_each_checkpointing_under_each_schedule_trains_or_is_refused(
    mode: str,
    schedule: str,
    gloo,
    data,
    unstaged,
):
    body = staged(schedule, f"checkpoint {{ {MODES[mode]} }}\n")
    refused = {"LP656"} if schedule in SPLIT_BACKWARD and mode in CHOOSING else set()
    assert errors(body) == refused
    found = wrong(gloo, text_of(body), data, unstaged)
    if refused:
        assert "backward an extra time" in found or "Timed out" in found, "the rule says that torch refuses"
    else:
        assert found == ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_blocks_under_each_schedule_train_or_are_refused(
    backend: str,
    schedule: str,
    gloo,
    data,
    unstaged,
):
    body = staged(schedule, f"compile {{ layers.* = {backend} }}\n")
    refused = {"LP517"} if schedule in SPLIT_BACKWARD else set()
    assert errors(body) == refused
    found = wrong(gloo, text_of(body), data, unstaged)
    if refused and (backend == "inductor" or schedule == "DualPipeV"):
        assert found.startswith("raises"), "the rule says that torch refuses"
    else:
        assert found == ""


def products(text: str, data: str) -> int:
    """Number of matrix products of one rank."""
    torch._dynamo.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(text, data, steps=2)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")


@pytest.mark.slow
def test_split_backward_recomputes_blocks_at_most_twice(gloo, data):
    schedule, full = "ZBVZeroBubble", "checkpoint { layers.* = full }\n"
    assert "RecomputingStage(" in text_of(staged(schedule, full))
    kept, recomputed = (sum(gloo(2)(products, text_of(staged(schedule, body)), data)) for body in ("", full))
    blocks, of_a_block = 2 * 4 * 4, 7
    assert blocks * of_a_block < recomputed - kept <= 2 * blocks * of_a_block


@pytest.mark.slow
def test_split_backward_runs_compiled_backward_twice(gloo, data):
    compiled = "compile { layers.* = aot_eager }\n"
    split = sum(gloo(2)(products, text_of(staged("InterleavedZeroBubble", compiled)), data))
    whole = sum(gloo(2)(products, text_of(staged("Interleaved1F1B", compiled)), data))
    micro_batches, layers, of_a_layer = 2 * 4, 4, 7
    assert split - whole > micro_batches * layers * of_a_layer, "most blocks go backward twice, not each: some as one"
