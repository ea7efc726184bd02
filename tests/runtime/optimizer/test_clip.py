"""Norms and clipping, against torch on one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from legoai.runtime.device import Device
from legoai.runtime.optimizer.clip import clip_gradients, reduce_partial_gradients, squared_norm_share
from support.training import programs


def norm_and_clipped(program: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """The gradient norm by our shares, and the clipped gradients as whole tensors."""
    import torch.distributed as dist

    training = programs.trainer(**program).prepare(Device(type="cpu"), seed=0)
    tokens = torch.arange(64).view(2, 32)
    from legoai.runtime.loss import loss_context, token_cross_entropy

    with loss_context(parallel="tp" in program and program.get("sequence_parallel", True)):
        (token_cross_entropy(training.model(tokens), tokens) * 50).backward()
    groups = training.optimizer.param_groups
    reduce_partial_gradients(groups)
    square = squared_norm_share(groups, holders=dist.get_world_size())
    dist.all_reduce(square)
    norm = math.sqrt(float(square))
    clip_gradients(groups, max_norm=0.5, total_norm=norm)
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in training.model.named_parameters()
    }
    return norm, gradients


def test_norm_and_clipping_equal_torch_on_one_process(gloo):
    norm, clipped = gloo(1)(norm_and_clipped, {})[0]
    expected_norm = gloo(1)(torch_norm)[0]
    assert norm == pytest.approx(expected_norm, rel=1e-12) and norm > 1
    assert float(nn.utils.get_total_norm(clipped.values())) == pytest.approx(0.5, rel=1e-5)
    for mesh in ({"tp": 4, "sequence_parallel": False}, {"dp_shard": 2, "tp": 2}):
        ranks = gloo(4)(norm_and_clipped, mesh)
        assert {rank[0] for rank in ranks} == {ranks[0][0]}, "the same bits on every rank"
        assert ranks[0][0] == pytest.approx(norm, rel=1e-12)
        for name, gradient in ranks[0][1].items():
            torch.testing.assert_close(gradient, clipped[name], rtol=1e-9, atol=1e-12)


def torch_norm() -> float:
    model = programs.trainer().prepare(Device(type="cpu"), seed=0).model
    tokens = torch.arange(64).view(2, 32)
    (torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) * 50).backward()
    return float(nn.utils.clip_grad_norm_(copy.copy(list(model.parameters())), 0.5))


def test_small_gradient_is_unchanged_bitwise():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.1, 0.2, 0.3])
    clip_gradients([{"params": [parameter]}], max_norm=1.0, total_norm=0.37)
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2, 0.3]))


def test_an_empty_gradient_has_norm_zero():
    assert float(squared_norm_share([{"params": [nn.Parameter(torch.zeros(3))]}], holders=4)) == 0.0


def test_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.0159)
    square = squared_norm_share([{"params": [parameter]}], holders=1)
    assert float(square) == pytest.approx(float(parameter.grad.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("others", [(), (torch.float32,), (torch.float32, torch.float64)])
def test_norm_of_fp16_gradients_may_exceed_the_range_of_fp16(others):
    parameters = [nn.Parameter(torch.zeros(90_000, dtype=dtype)) for dtype in (torch.float16, *others)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 250.0)
    square = squared_norm_share([{"params": [parameter]} for parameter in parameters], holders=1)
    assert float(square) == pytest.approx(len(parameters) * 75_000**2, rel=1e-3)
