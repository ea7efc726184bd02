"""Effects of the patches of device meshes and FSDP parameters; each test fails without the patches that name it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from legoai.cost.simulated.device import SIM, Recorder
from legoai.cost.simulated.large_worlds import Chunks
from legoai.cost.simulated.process import simulated_device
from legoai.runtime.parallelism.mesh import join_axes, split_off_experts
from legoai.runtime.torch_internals.fake_tensors import unset_fake_temporarily
from legoai.runtime.torch_internals.patching import original
from support.simulation import simulated


class Nobody(Recorder):
    def record(self, record) -> None: ...


def simulate(function, *, rank: int = 5, world: int = 8):
    """Call a function under a fake tensor mode on one rank of a simulated world."""
    return simulated.in_a_fork(_simulate, function, rank, world)


def _simulate(function, rank: int, world: int):
    with simulated_device(Nobody(), rank=rank, world=world, kind="cuda") as fake, fake:
        return function()


def mesh_of(*sizes: int, names: str = "dp"):
    """A mesh with axes of one letter each or with one axis, made without fake tensors as a simulation makes them."""
    with unset_fake_temporarily():
        return init_device_mesh(SIM, sizes, mesh_dim_names=tuple(names) if len(sizes) > 1 else (names,))


def three_axes():
    return mesh_of(2, 2, 2, names="abc")


def joined() -> list:
    mesh = three_axes()
    flat, both = join_axes(mesh, ("a", "b")), join_axes(mesh, ("a",), ("b", "c"))
    split = split_off_experts(mesh_of(8), ep=2)
    names = [flat.mesh_dim_names, both.mesh_dim_names, split.mesh_dim_names]
    groups = [
        dist.get_process_group_ranks(item) for item in (flat.get_group(), both.get_group(1), split.get_group("ep"))
    ]
    return [*names, *groups]


def test_axes_are_joined_and_split():
    assert simulate(joined) == [
        ("a_b",), ("a", "b_c"), ("dp_mod_ep", "ep"), [1, 3, 5, 7], [4, 5, 6, 7], [4, 5],
    ]  # fmt: skip


def split_inside() -> list:
    """The ranks of the axes of a mesh whose outer axis of neighbours replicates experts that an inner axis shards."""
    mesh = mesh_of(4, 2, names="ac")
    split = split_off_experts(join_axes(mesh, ("c",), ("a",)), ep=2)
    joined = join_axes(split, ("c",), ("a_mod_ep",))
    groups = [dist.get_process_group_ranks(joined.get_group(axis)) for axis in range(2)]
    return [joined.mesh_dim_names, *groups, dist.get_process_group_ranks(split.get_group("ep"))]


def test_axes_are_joined_after_the_inner_one_is_split():
    assert simulate(split_inside) == [("c", "a_mod_ep"), [4, 5], [1, 5], [5, 7]]


def known() -> list:
    mesh = three_axes()
    whole = mesh_of(8)
    names = [f"{name}: {mesh.get_local_rank(name)} of {mesh[name].size()}" for name in ("a", "b", "c")]
    ranks = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("a", "b", "c")]
    return [names, mesh.get_coordinate(), whole.get_local_rank(), mesh["a", "c"].size(), *ranks]


def test_mesh_ranks_and_coordinates_are_known():
    assert simulate(known) == [
        ["a: 1 of 2", "b: 0 of 2", "c: 1 of 2"], (1, 0, 1), 5, 4, [1, 5], [5, 7], [4, 5],
    ]  # fmt: skip


def resharded() -> list[int]:
    mesh = mesh_of(8)
    with torch.device("meta"):
        model = nn.Linear(16, 16, bias=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=2)
    group = model._get_fsdp_state()._fsdp_param_group
    return dist.get_process_group_ranks(group.post_forward_mesh_info.shard_process_group)


def test_units_reshard_over_some_of_their_ranks():
    assert simulate(resharded) == [4, 5]


def redistributed() -> list[tuple[int, ...]]:
    """Local shapes of a sharded sequence, of the same with its batch flattened, and of that gathered."""
    mesh = mesh_of(8)
    sequences = DTensor.from_local(torch.empty(3, 2, 4, device=SIM), mesh, [Shard(1)])
    tokens = sequences.view(3 * 16, 4)
    return [tuple(one.to_local().shape) for one in (sequences, tokens, tokens.redistribute(mesh, [Replicate()]))]


def test_strided_shards_are_redistributed():
    assert simulate(redistributed) == [(3, 2, 4), (6, 4), (48, 4)]


def compared() -> list[bool]:
    one, other = (mesh_of(8) for _ in range(2))
    assert one is not other
    apart = one._flatten_rank_map is other._flatten_rank_map
    return [apart, one == other, one._flatten_rank_map is other._flatten_rank_map, one == three_axes()]


def test_ranks_of_equal_meshes_are_compared_once():
    _, equal, shared, different = simulate(compared)
    assert (equal, shared, different) == (True, True, False)


def groups() -> tuple[list[list[int]], int]:
    three_axes()
    found = [dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map]
    return sorted(ranks for ranks in found if len(ranks) < 8), dist.distributed_c10d._world.group_count


def test_groups_of_other_ranks_are_not_created():
    made, counted = simulate(groups)
    assert made == [[1, 5], [4, 5], [5, 7]]
    assert counted <= 1 + len(made), "torch counts the groups that it makes for other ranks too"


def cut() -> tuple[bool, tuple[int, ...]]:
    with torch.device("meta"):
        model = nn.Linear(16, 16, bias=False)
    fully_shard(model, mesh=mesh_of(8))
    chunks = original("torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty")
    return chunks is Chunks, tuple(model.weight.to_local().shape)


def test_units_compute_only_their_own_chunk():
    assert simulate(cut) == (True, (2, 16))
