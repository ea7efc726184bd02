"""Muon on parts of matrices is torch's Muon on whole ones, to the bit."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from legoai.runtime import CombinedOptimizer, Muon, ShardedOptimizer
from legoai.runtime.optimizer import muon as module
from legoai.runtime.optimizer.parameter_groups import ParameterGroups
from legoai.runtime.torch_internals.distributed.meshes import StridedShard
from support.marks import slow_but

SHAPES = [(8, 6)] * 6 + [(7, 5)] * 3 + [(3, 12)]
PLACEMENTS = {
    "rows": ({"dp_shard": 4}, [Shard(0)]),
    "columns": ({"tp": 4}, [Shard(1)]),
    "replicas": ({"dp_replicate": 4}, [Replicate()]),
    "rows of replicas": ({"dp_replicate": 2, "dp_shard": 2}, [Replicate(), Shard(0)]),
    "rows and columns": ({"dp_shard": 2, "tp": 2}, [Shard(0), Shard(1)]),
    "rows beside replicas": ({"dp_shard": 2, "tp": 2}, [Shard(0), Replicate()]),
}
CONSTANTS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def model() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(shape).double()) for shape in SHAPES])


def gradients(parameters, step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in parameters:
        grad = torch.randn(parameter.shape).double()
        if isinstance(parameter, DTensor):
            # The whole is the same on every rank; parts of it by the parameter's own placements.
            grad = as_parts(grad, parameter)
        parameter.grad = grad


def as_parts(whole: torch.Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    if not any(isinstance(item, StridedShard) for item in like.placements):
        return distribute_tensor(whole, mesh, like.placements, src_data_rank=None)
    replicated = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    within = replicated.redistribute(placements=[Replicate(), like.placements[1]]).to_local()
    rows = within.chunk(mesh.size(0))[mesh.get_local_rank(0)].contiguous()
    return DTensor.from_local(rows, mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def trained(name: str, **options) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The parameters after some steps, and how many matrices this rank orthogonalized in the last."""
    axes, placements = PLACEMENTS[name]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parameters = [nn.Parameter(distribute_tensor(item.data, mesh, placements, src_data_rank=None)) for item in model()]
    return steps(Muon(parameters, **CONSTANTS, **options), parameters)


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> tuple[list[torch.Tensor], int]:
    whole, counted = module.orthogonalized, Counter()

    def count(matrix: torch.Tensor, *constants) -> torch.Tensor:
        counted["matrices"] += 1
        return whole(matrix, *constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "orthogonalized", count)
        for step in range(3):
            gradients(parameters, step)
            optimizer.step()
    return [as_whole(item) for item in parameters], counted["matrices"] // 3


def as_whole(item: torch.Tensor) -> torch.Tensor:
    return item.full_tensor().detach() if isinstance(item, DTensor) else item.detach()


def by_torch(**options) -> list[torch.Tensor]:
    parameters = list(model())
    optimizer = torch.optim.Muon(parameters, **CONSTANTS, **options)
    for step in range(3):
        gradients(parameters, step)
        optimizer.step()
    return [item.detach() for item in parameters]


@pytest.mark.parametrize("name", slow_but(PLACEMENTS, "rows of replicas", "rows and columns"))
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}], ids=str
)
def test_sharded_matrices_are_updated_as_whole_ones(name: str, options: dict, gloo):
    wanted = by_torch(**options)
    counts = []
    for parameters, count in gloo(4)(trained, name, **options):
        for own, torchs in zip(parameters, wanted, strict=True):
            assert torch.equal(own, torchs)
        counts.append(count)
    axes, placements = PLACEMENTS[name]
    copies = 1
    for size, placement in zip(axes.values(), placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    assert sum(counts) == copies * len(SHAPES), "a matrix is orthogonalized once by those that share it"


def under_fully_shard() -> list[torch.Tensor]:
    """Linear layers with rows sharded by tensor parallelism and then by `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    layers = nn.Sequential(*(nn.Linear(6, 8, bias=False) for _ in range(5))).double()
    for layer, item in zip(layers, model(), strict=False):
        placed = distribute_tensor(item.data, mesh["tp"], [Shard(0)], src_data_rank=None)
        layer.weight = nn.Parameter(placed)
    fully_shard(layers, mesh=mesh["dp_shard"])
    parameters = list(layers.parameters())
    assert any(isinstance(item, StridedShard) for item in parameters[0].placements)
    found, count = steps(Muon(parameters, **CONSTANTS), parameters)
    assert 1 <= count <= 2
    return found


def test_rows_sharded_on_two_axes_are_gathered_in_order(gloo):
    wanted = by_torch()
    for parameters in gloo(4)(under_fully_shard):
        # The gradients of the first five are those of the whole list, which draws them in this order.
        for own, torchs in zip(parameters, wanted, strict=False):
            assert torch.equal(own, torchs)


def test_plain_matrices_are_updated_as_by_torch():
    parameters = list(model())
    found, count = steps(Muon(parameters, **CONSTANTS), parameters)
    assert count == len(SHAPES)
    assert all(map(torch.equal, found, by_torch()))


def shared_by_replicas() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    parameters = [
        nn.Parameter(distribute_tensor(item.data, mesh, [Replicate()], src_data_rank=None)) for item in model()
    ]
    optimizer = ShardedOptimizer([{"params": parameters}], Muon, axis="dp_replicate", **CONSTANTS)
    return steps(optimizer, parameters)[0]


def test_replicas_with_sharded_state_share_the_work(gloo):
    for parameters in gloo(4)(shared_by_replicas):
        assert all(map(torch.equal, parameters, by_torch()))


def combined() -> CombinedOptimizer:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    torch.manual_seed(1)
    for parameter in layers.parameters():
        parameter.data = torch.randn(parameter.shape).double()
    parameters = ParameterGroups(layers.named_parameters())
    matrices = parameters.take("*.weight", **CONSTANTS)
    return CombinedOptimizer(torch.optim.AdamW(parameters.rest(), lr=0.1), Muon(matrices))


def test_combined_optimizer_has_one_schedule_and_state_dict():
    optimizer = combined()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02] and optimizer.defaults["lr"] == 0.1
    everything = [item for group in optimizer.param_groups for item in group["params"]]
    gradients(everything, 0)
    optimizer.step()
    assert {len(optimizer.state[item]) for item in everything} == {1, 3}
    other = combined()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [item for group in other.param_groups for item in group["params"]]
    for one, two in zip(everything, others, strict=True):
        two.data.copy_(one.data)
    for group in (*optimizer.param_groups, *other.param_groups):
        group["lr"] *= 0.5
    for each, parameters in ((optimizer, everything), (other, others)):
        gradients(parameters, 1)
        each.step()
    assert all(map(torch.equal, everything, others))


def test_optimizers_without_parameters_do_nothing():
    optimizer = CombinedOptimizer(torch.optim.AdamW([{"params": []}], fused=True), Muon([{"params": []}]))
    optimizer.step()
    assert not optimizer.state
