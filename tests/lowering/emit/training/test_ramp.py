"""A batch that grows: the same samples and updates on a mesh as on one process, and after a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.shrink import shrink
from legoai.lowering.verify.one_device import train as train_by_hand
from legoai.runtime import RunError
from legoai.specs.models.build import build_model
from legoai.specs.models.reads import Tokens
from support.texts.plans import HEAD, lowered, manifest_of, resolved
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, together, train

BATCH = "batch (global = 16, micro = 2, seq_len = 16, ramp = stages(global = [4, 8], until = [1, 3]))\n"
TRAINING = f"""\
{BATCH}optimizer adamw(lr = 1e-2, weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 1, steps = 10, floor = 0.1)
"""
ALONE = f"{HEAD}{TRAINING}{PLAIN_DOUBLE}"
SHARDED = f"{HEAD}{TRAINING}mesh (dp_shard = 2)\nfsdp on dp_shard {{ layers.* = unit }}\n{DOUBLE}"
ONCE = f"{SHARDED}comm (reduce = last_micro_batch)\n"
STEPS = 5


@pytest.fixture(scope="module")
def alone(gloo, data) -> dict:
    [result] = gloo(1)(train, lowered(ALONE).text, data, steps=STEPS)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHARDED, id="reduced each time", marks=pytest.mark.slow),
        pytest.param(ONCE, id="reduced once"),
    ],
)
def test_growing_batch_on_a_mesh_equals_one_process(plan: str, gloo, data, alone):
    assert_close(together(gloo(2)(train, lowered(plan).text, data, steps=STEPS)), alone, TOLERANCE)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_resumed_run_continues_the_ramp_with_the_same_samples(step: int, gloo, data, alone, tmp_path):
    text = lowered(ALONE).text
    gloo(1)(train, text, data, steps=step, out=tmp_path)
    [result] = gloo(1)(train, text, data, steps=STEPS, out=tmp_path)
    assert result["resumed_from"] == step
    assert result["loss"] == alone["loss"][step:]
    for name, parameter in result["parameters"].items():
        assert torch.equal(parameter, alone["parameters"][name]), name


def test_growing_batch_follows_the_plan(data, alone):
    plan = resolved(ALONE)
    build = functools.partial(build_model, plan.model.source(), Path())
    wanted = train_by_hand(plan, build, Tokens(), data=data, steps=STEPS, seed=0, tell=lambda _: None)
    assert [len(samples) for samples in wanted["samples"]] == [4, 8, 8, 16, 16]
    assert alone["loss"] == pytest.approx(wanted["losses"], abs=TOLERANCE)


def refusal(text: str, data: str) -> str:
    with pytest.raises(RunError) as raised:
        train(text, data, steps=2)
    return raised.value.message


def test_program_inconsistent_with_its_ramp_is_stopped(gloo, data):
    text = lowered(ALONE).text
    edited = text.replace("if step < 1:", "if step < 0:")
    [message] = gloo(1)(refusal, edited, data)
    assert message == "the program's step takes 4 micro batches of a rank, and a global batch of 4 samples has 2"
    [message] = gloo(1)(refusal, text.replace("ramp=((1, 4)", "ramp=((1, 3)"), data)
    assert message.startswith("a global batch of 3 samples is not a multiple of micro batch 2")


def test_shrunken_plan_keeps_a_ramp():
    plan = resolved(ALONE.replace("until = [1, 3]", "until = [1000, 3000]"))
    found = shrink(Analysis(plan, manifest_of(plan.model.source()), file="tiny.plan"))
    ramp = found.plan.batch.ramp
    assert ramp is not None
    assert (ramp.batches, ramp.until, found.plan.batch.global_batch) == ((2,), (1,), 4)
