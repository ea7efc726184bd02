"""Parameters with constants of their own are updated as on one process, on any mesh."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from legoai.lowering.verify.one_device import train as train_by_hand
from legoai.runtime import RunError
from legoai.runtime.device import Device
from legoai.specs.models.build import build_model
from legoai.specs.models.reads import Tokens
from support.marks import slow_but
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered, resolved
from support.training.staged import DOUBLE, PLAIN_DOUBLE, STEPS, TOLERANCE, assert_close, together, train

GROUPS = """\
optimizer adamw(lr = 1e-2, betas = [0.9, 0.95], weight_decay = 0.1) {
  norm                       = group(weight_decay = 0)
  layers.*.*_norm            = group(weight_decay = 0)
  tok_embeddings             = group(lr_scale = 0.5)
  layers.{0..1}.feed_forward = group(lr = 2e-3, betas = [0.8, 0.99], eps = 1e-6)
  layers.0.feed_forward.w2   = group
}
"""
TRAINING = f"""\
batch     (global = 16, micro = 2, seq_len = 16)
clip      (norm = 1.0)
schedule  cosine(warmup = 1, steps = 10, floor = 0.1)
{GROUPS}"""
MUON = """\
optimizer adamw(lr = 1e-2, betas = [0.9, 0.95], weight_decay = 0.1) {
  layers.**                  = muon(lr = 0.02, weight_decay = 0.05)
  layers.*.attention.{wq,wk} = muon(lr = 5e-3, momentum = 0.9, nesterov = false, adjust_lr = match_rms_adamw)
  layers.0.feed_forward      = group(lr_scale = 0.5)
  layers.*.attention_norm    = group(weight_decay = 0)
}
"""
PLANS = {
    "sharded, two axes": f"""
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {{ layers.* = unit, root = unit }}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "stages, of which one has no embeddings and one no norm": f"""
mesh (pp = 2, dp_shard = 2)
pipeline on pp
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit(reshard = after_backward) }}
{DOUBLE}""",
    "replicas that share the state": f"""
mesh (dp_replicate = 4)
replicate on dp_replicate (optimizer = sharded)
{DOUBLE}""",
    "not fused": f"""
mesh (tp = 4)
{SEQUENCE_PARALLEL}
optimizer {GROUPS.removeprefix("optimizer ").replace("0.1)", "0.1, fused = false)")}
{PLAIN_DOUBLE}""",
}


BY_MUON = {
    "sharded, two axes": PLANS["sharded, two axes"],
    "sharded, with state in host memory": f"""
mesh (dp_shard = 4)
fsdp on dp_shard {{ layers.* = unit, root = unit }}
offload (optimizer = all)
{DOUBLE}""",
    "stages of which the last has no matrix": f"""
mesh (pp = 2, dp_shard = 2)
pipeline on pp (split = [norm])
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit(reshard = after_backward) }}
{DOUBLE}""",
    "replicas that share the state": PLANS["replicas that share the state"],
    "sharded replicas": f"""
mesh (dp_replicate = 2, dp_shard = 2)
fsdp on dp_replicate, dp_shard {{ layers.* = unit, root = unit }}
{DOUBLE}""",
}


def text_of(body: str, optimizer: str = GROUPS) -> str:
    training = TRAINING.replace(GROUPS, "" if "\noptimizer " in body else optimizer)
    return lowered(f"{HEAD}{training}{body}").text


@pytest.fixture(scope="module")
def alone(gloo, data) -> dict:
    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE), data)
    return result


@pytest.fixture(scope="module")
def alone_by_muon(gloo, data) -> dict:
    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE, MUON), data)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_MUON)
def test_muon_on_a_mesh_equals_one_process(name: str, gloo, data, alone_by_muon):
    assert_close(together(gloo(4)(train, text_of(BY_MUON[name], MUON), data)), alone_by_muon, TOLERANCE)


@pytest.mark.slow
def test_muon_continues_from_a_checkpoint_of_another_mesh(gloo, data, alone_by_muon, tmp_path):
    options = {"data": data, "out": tmp_path}
    gloo(4)(train, text_of(BY_MUON["stages of which the last has no matrix"], MUON), steps=1, **options)
    result = gloo(4)(train, text_of(BY_MUON["sharded, two axes"], MUON), **options)[0]
    assert result["resumed_from"] == 1
    for name, parameter in result["parameters"].items():
        torch.testing.assert_close(parameter, alone_by_muon["parameters"][name], rtol=0, atol=TOLERANCE, msg=name)


def refusal(text: str, data: str, folder: Path) -> str:
    with pytest.raises(RunError) as raised:
        train(text, data, steps=2, out=folder)
    return raised.value.message


def test_checkpoint_with_other_muon_parameters_is_refused(gloo, data, tmp_path):
    gloo(1)(train, text_of(PLAIN_DOUBLE, MUON), data, steps=1, out=tmp_path)
    fewer = MUON.replace("layers.**  ", "layers.0.**")
    [message] = gloo(1)(refusal, text_of(PLAIN_DOUBLE, fewer), data, tmp_path)
    assert "other things of some parameters: it has no layers.1.attention.wo.weight.exp_avg" in message


def test_muon_equals_torch_muon(data, alone_by_muon):
    wanted = by_hand(MUON, data)
    assert alone_by_muon["loss"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
    for name, parameter in alone_by_muon["parameters"].items():
        torch.testing.assert_close(parameter, wanted["trained"][name], rtol=0, atol=TOLERANCE, msg=name)
    assert wanted["rates"]["layers.0.attention.wq.weight"][0] == 5e-3
    assert wanted["rates"]["layers.0.feed_forward.w1.weight"][0] == 5e-3, "half of AdamW's"
    assert wanted["rates"]["layers.1.feed_forward.w1.weight"][0] == 0.02
    assert wanted["rates"]["layers.1.ffn_norm.weight"][0] == 1e-2


def by_hand(optimizer: str, data: str) -> dict:
    plan = resolved(f"{HEAD}{TRAINING.replace(GROUPS, optimizer)}{PLAIN_DOUBLE}")
    build = functools.partial(build_model, plan.model.source(), Path())
    return train_by_hand(plan, build, Tokens(), data=data, steps=STEPS, seed=0, tell=lambda _: None)


@pytest.mark.parametrize("name", slow_but(PLANS, "stages, of which one has no embeddings and one no norm"))
def test_parameter_groups_on_a_mesh_equal_one_process(name: str, gloo, data, alone):
    assert_close(together(gloo(4)(train, text_of(PLANS[name]), data)), alone, TOLERANCE)


def test_parameter_groups_equal_the_plan(data, alone):
    wanted = by_hand(GROUPS, data)
    assert alone["loss"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
    for name, parameter in alone["parameters"].items():
        torch.testing.assert_close(parameter, wanted["trained"][name], rtol=0, atol=TOLERANCE, msg=name)
    assert wanted["rates"]["tok_embeddings.weight"][0] == pytest.approx(wanted["rates"]["output.weight"][0] / 2)
    assert wanted["rates"]["layers.0.feed_forward.w1.weight"][0] == pytest.approx(2e-3)
    assert wanted["rates"]["layers.0.feed_forward.w2.weight"] == wanted["rates"]["output.weight"]


@pytest.mark.slow
def test_parameter_groups_continue_from_a_checkpoint_of_another_mesh(gloo, data, alone, tmp_path):
    options = {"data": data, "out": tmp_path}
    gloo(4)(train, text_of(PLANS["stages, of which one has no embeddings and one no norm"]), steps=1, **options)
    plan = PLANS["sharded, two axes"]
    result = gloo(4)(train, text_of(plan), **options)[0]
    assert result["resumed_from"] == 1
    for name, parameter in result["parameters"].items():
        torch.testing.assert_close(parameter, alone["parameters"][name], rtol=0, atol=TOLERANCE, msg=name)


def sizes_of_groups(text: str) -> list[int]:
    namespace: dict = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    training = namespace["trainer"]().prepare(Device(type="cpu"), seed=0)
    return [len(group["params"]) for group in training.optimizer.param_groups]


def test_stage_without_group_parameters_has_an_empty_group(gloo):
    body = PLANS["stages, of which one has no embeddings and one no norm"].replace("(pp = 2, dp_shard = 2)", "(pp = 4)")
    body = body.replace(body[body.index("fsdp on") : body.index(DOUBLE)], "").replace(DOUBLE, PLAIN_DOUBLE)
    first, *_, last = gloo(4)(sizes_of_groups, text_of(body))
    assert len(first) == len(last) == 6
    assert 0 in first and 0 in last, (first, last)
