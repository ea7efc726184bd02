"""Parameter groups: by constants, and by what one fused kernel can update."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from legoai.runtime.device import Device
from legoai.runtime.optimizer.parameter_groups import ParameterGroups
from legoai.runtime.optimizer.schedule import learning_rate, schedule_end, warmup_schedule
from support.training import programs


def groups_of(program: dict) -> list[tuple[int, set[tuple[str, ...] | None]]]:
    training = programs.trainer(**program).prepare(Device(type="cpu"), seed=0)
    return [
        (
            len(group["params"]),
            {p.device_mesh.mesh_dim_names if isinstance(p, DTensor) else None for p in group["params"]},
        )
        for group in training.optimizer.param_groups
    ]


def test_parameter_group_has_one_mesh(gloo):
    norms, matrices = 2 * programs.LAYERS, 7 * programs.LAYERS
    assert gloo(4)(groups_of, {"dp_shard": 2, "tp": 2, "sequence_parallel": False})[0] == [
        (norms + 3, {("dp_shard",)}),
        (matrices, {("dp_shard", "tp")}),
    ]
    assert gloo(4)(groups_of, {"tp": 4, "sequence_parallel": False})[0] == [
        (norms + 3, {None}),
        (matrices, {("tp",)}),
    ]
    assert len(gloo(4)(groups_of, {"dp_shard": 4})[0]) == 1


def stacked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2)))
    model[0].bias.requires_grad_(False)
    return model


def sizes(groups: list[dict]) -> list[tuple[list[int], float | None]]:
    return [([p.ndim for p in group["params"]], group.get("weight_decay")) for group in groups]


def test_rest_group_excludes_taken_and_frozen_parameters():
    parameters = ParameterGroups(stacked().named_parameters())
    assert sizes(parameters) == [([2, 2, 1, 1], None)]
    assert sizes(parameters.take("1.*.bias", "1.1.weight", weight_decay=0.0)) == [([1, 1], 0.0)]
    assert sizes(parameters.rest()) == [([2, 2], None)]


def test_star_matches_one_path_segment():
    parameters = ParameterGroups(stacked().named_parameters())
    assert sizes(parameters.take("*.weight")) == [([2], None)]
    assert sizes(parameters.take("*.*.weight")) == [([2, 1], None)]


def test_names_ignore_wrappers():
    model = stacked()
    model[1] = checkpoint_wrapper(model[1])
    parameters = ParameterGroups(model.named_parameters())
    assert sizes(parameters.take("1.0.weight", weight_decay=0.5)) == [([2], 0.5)]


def test_optimizers_accept_empty_parameter_groups():
    parameters = ParameterGroups(stacked().named_parameters())
    groups = [*parameters.take("not.here", weight_decay=0.0), *parameters.take("*.*", "*.*.*"), *parameters.rest()]
    assert sizes(groups) == [([], 0.0), ([2, 2, 1, 1], None), ([], None)]
    for made in (
        torch.optim.AdamW(groups, fused=True),
        torch.optim.Adam(groups, foreach=True),
        torch.optim.SGD(groups),
    ):
        for parameter in groups[1]["params"]:
            parameter.grad = torch.ones_like(parameter)
        made.step()


def test_logged_learning_rate_is_that_of_the_default_group():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 8.0}, {"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer = torch.optim.SGD(groups, lr=2.0)
    assert learning_rate(optimizer, None) == 2.0
    scheduler = warmup_schedule(optimizer, warmup=4, steps=10, decay="linear", floor=0.1)
    assert learning_rate(optimizer, scheduler) == 0.5 and optimizer.param_groups[0]["lr"] == 2.0
    assert schedule_end(scheduler) == (10, 0.2)
