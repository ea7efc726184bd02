"""Replicas share the optimizer's work, and each keeps its own share."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from legoai.runtime import ShardedOptimizer
from legoai.runtime.checkpoint.checkpoint import OPTIMIZER, forget_state, loadable_state, training_state
from legoai.runtime.optimizer.parameter_groups import ParameterGroups

CLASSES = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
}
SHAPES = {"even": (8, 3), "uneven": (7, 5), "fewer rows than ranks": (3,), "one number": ()}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(shape).double()) for name, shape in SHAPES.items()})


def replicated(model: nn.Module, axes: dict[str, int]) -> nn.Module:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    for name, parameter in model.items():
        placements = [Replicate()] * mesh.ndim
        if "tp" in axes and parameter.ndim == 2 and name == "even":
            placements[-1] = Shard(0)
        model[name] = nn.Parameter(distribute_tensor(parameter.data, mesh, placements, src_data_rank=None))
    return model


def gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in model.values():
        grad = torch.randn(parameter.shape).double()
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad


def updates(kind: str, axes: dict[str, int], steps: int = 3) -> dict:
    optimizer_class, constants = CLASSES[kind]
    alone = plain_model()
    model = replicated(copy.deepcopy(alone), axes)
    one = optimizer_class(alone.values(), **constants)
    many = ShardedOptimizer(
        ParameterGroups(model.named_parameters()), optimizer_class, axis="dp_replicate", **constants
    )
    for step in range(steps):
        for group in (*one.param_groups, *many.param_groups):
            group["lr"] = 0.1 / (step + 1)  # as a schedule would
        gradients(alone, step)
        gradients(model, step)
        one.step()
        with warnings.catch_warnings():  # a user would see one on every rank
            warnings.simplefilter("error")
            many.step()
    kept: dict[str, int] = {}
    for name, parameter in model.items():
        torch.testing.assert_close(parameter.full_tensor(), alone[name].data, rtol=1e-14, atol=1e-15)
        for key, value in many.state[parameter].items():
            whole = one.state[alone[name]][key]
            if isinstance(value, DTensor):
                torch.testing.assert_close(value.full_tensor(), whole, rtol=1e-14, atol=1e-15)
                kept[name] = kept.get(name, 0) + value.to_local().numel()
    return kept


def state_before_an_update(kind: str) -> list[int]:
    """Parameters that have state, as the whole and its slices have it: before and while it is loaded, and after that"""
    optimizer_class, constants = CLASSES[kind]
    model = replicated(plain_model(), {"dp_replicate": 2})
    optimizer = ShardedOptimizer(
        ParameterGroups(model.named_parameters()), optimizer_class, axis="dp_replicate", **constants
    )
    counts = []

    def note() -> None:
        counts.extend([len(optimizer.state), len(optimizer.sliced.state)])

    assert not any(name.startswith(OPTIMIZER) for name in training_state(model, optimizer))
    note()
    state = loadable_state(model, optimizer)
    note()
    forget_state(optimizer, [tensor for name, tensor in state.items() if name.startswith(f"{OPTIMIZER}even")])
    note()
    return counts


@pytest.mark.parametrize("kind", CLASSES)
def test_state_before_an_update_is_neither_saved_nor_left(gloo, kind: str):
    assert gloo(2)(state_before_an_update, kind) == [[0, 0, 4, 4, 3, 3]] * 2


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("axes", [{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}], ids=str)
def test_slices_are_updated_as_whole_parameters_with_single_state(gloo, kind: str, axes: dict[str, int]):
    kept = gloo(4)(updates, kind, axes)
    states = 2 if kind == "adamw" else 1
    copies = axes.get("tp", 1)
    for name in ("even", "uneven", "fewer rows than ranks"):
        once = states * torch.Size(SHAPES[name]).numel()
        assert sum(rank[name] for rank in kept) == once * (1 if name == "even" else copies), name
    assert kept[0]["even"] == states * 24 // 4


def refusal(placement: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    data = torch.zeros(4, 2)
    parameter = nn.Parameter(data if placement == "plain" else distribute_tensor(data, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="parameter of shape") as raised:
        ShardedOptimizer([{"params": [parameter]}], torch.optim.SGD, axis="dp_replicate", lr=0.1)
    return str(raised.value)


def test_parameters_that_are_not_replicas_are_refused(gloo):
    assert "does not lie on the mesh axis 'dp_replicate'" in gloo(2)(refusal, "plain")[0]
    assert "not replicated" in gloo(2)(refusal, "sharded")[0]


def loaded() -> None:
    constants = {"lr": 0.1}
    model = replicated(plain_model(), {"dp_replicate": 2})

    def optimizer() -> ShardedOptimizer:
        return ShardedOptimizer(
            ParameterGroups(model.named_parameters()), torch.optim.AdamW, axis="dp_replicate", **constants
        )

    first = optimizer()
    gradients(model, 0)
    first.step()
    second = optimizer()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    start = {name: parameter.detach().clone() for name, parameter in model.items()}
    ends = []
    for item in (first, second):
        with torch.no_grad():
            for name, parameter in model.items():
                parameter.copy_(start[name])
        gradients(model, 1)
        item.step()
        ends.append({name: parameter.full_tensor().clone() for name, parameter in model.items()})
    for name in SHAPES:
        assert torch.equal(ends[0][name], ends[1][name])
        assert not torch.equal(ends[0][name], start[name].full_tensor())


def test_loaded_optimizer_continues_as_the_saved_one(gloo):
    gloo(2)(loaded)
