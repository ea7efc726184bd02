"""Schedules, groups, norms and clipping, against torch on one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from legoai.runtime.device import Device
from legoai.runtime.optim import (
    clip_gradients,
    reduce_partial_gradients,
    set_schedule_step,
    squared_norm_share,
    warmup_schedule,
)
from support import programs


def rates(count: int, **schedule) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_schedule(optimizer, **schedule)
    seen = []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_a_linear_decay_goes_straight_to_the_floor_and_stays():
    assert rates(9, warmup=2, steps=6, decay="linear", floor=0.5) == pytest.approx(
        [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0]
    )


def test_a_cosine_decay_is_half_way_in_the_middle():
    seen = rates(12, warmup=0, steps=10, decay="cosine", floor=0.0)
    assert seen[0] == 2.0 and seen[5] == pytest.approx(1.0) and seen[10] == seen[11] == 0.0
    assert seen[3] == pytest.approx(1.0 + math.cos(math.pi * 0.3))


def test_a_constant_schedule_stays_at_the_peak():
    assert rates(5, warmup=4, steps=4, decay="constant") == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup": 11}, "warmup must be between 0 and steps = 10"),
        ({"floor": 1.5}, "floor must be a fraction"),
        ({"decay": "sudden"}, "decay must be one of constant, linear, cosine"),
    ],
)
def test_a_schedule_says_what_it_takes(change, message):
    with pytest.raises(ValueError, match=message):
        rates(1, **{"warmup": 1, "steps": 10} | change)


def test_setting_the_step_is_having_stepped():
    def schedule() -> torch.optim.lr_scheduler.LambdaLR:
        parameters = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1}]
        return warmup_schedule(torch.optim.SGD(parameters, lr=1.0), warmup=3, steps=20)

    stepped, jumped = schedule(), schedule()
    for _ in range(7):
        stepped.optimizer.step()
        stepped.step()
    set_schedule_step(jumped, 7)
    assert [group["lr"] for group in stepped.optimizer.param_groups] == [
        group["lr"] for group in jumped.optimizer.param_groups
    ]
    assert jumped.get_last_lr() == stepped.get_last_lr() and jumped.last_epoch == stepped.last_epoch


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


def test_norm_and_clipping_are_those_of_torch_on_one_process(gloo):
    norm, clipped = gloo(1)(norm_and_clipped, {})[0]
    expected_norm = gloo(1)(torch_norm)[0]
    assert norm == pytest.approx(expected_norm, rel=1e-12) and norm > 1
    assert float(nn.utils.get_total_norm(clipped.values())) == pytest.approx(0.5, rel=1e-5)
    for mesh in ({"dp_shard": 4}, {"tp": 4}, {"tp": 4, "sequence_parallel": False}, {"dp_shard": 2, "tp": 2}):
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


def test_a_small_gradient_is_left_alone_to_the_bit():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.1, 0.2, 0.3])
    clip_gradients([{"params": [parameter]}], max_norm=1.0, total_norm=0.37)
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2, 0.3]))


def test_an_empty_gradient_has_norm_zero():
    assert float(squared_norm_share([{"params": [nn.Parameter(torch.zeros(3))]}], holders=4)) == 0.0
