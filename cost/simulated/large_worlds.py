"""Simulation of large worlds: torch's loops over all ranks are reduced to the simulated rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupMember

from legoai.runtime.torch_internals.patching import original, patched

_NEW_GROUP: Final = "torch.distributed.device_mesh:new_group"


@contextlib.contextmanager
def one_rank_alone() -> Iterator[None]:
    """While entered, create objects for this rank only where torch creates them for all ranks; others on demand.

    The time to simulate a step then does not depend on the number of ranks.
    """
    made: Callable[..., Any] = original(_NEW_GROUP)

    def new_group(ranks: Sequence[int], **options: Any) -> Any:
        # Torch lets each rank create the groups of all ranks along a mesh axis, and keeps the one that the rank is in.
        return made(ranks, **options) if dist.get_rank() in ranks else GroupMember.NON_GROUP_MEMBER

    with (
        patched(_NEW_GROUP, new_group),
        patched("torch.distributed.device_mesh:DeviceMesh.__eq__", _are_equal),
        patched("torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty", Chunks),
    ):
        yield


def _are_equal(mesh: DeviceMesh, other: object) -> bool:
    """Whether two meshes are equal. After a first comparison equal meshes share one tuple of ranks."""
    if mesh is other:
        return True
    if not isinstance(other, DeviceMesh):
        return False
    if mesh._flatten_rank_map is not other._flatten_rank_map:
        if mesh._flatten_rank_map != other._flatten_rank_map:
            return False
        if type(other) is DeviceMesh:  # not what the compilation of a program uses in its place
            other._flatten_rank_map = mesh._flatten_rank_map
    return (
        mesh._layout == other._layout
        and mesh._device_type == other._device_type
        and mesh._mesh_dim_names == other._mesh_dim_names
        and mesh._thread_id == other._thread_id
    )


class Chunks(Sequence[torch.Tensor]):
    """The chunks of a tensor, one for each rank, created on access: those of `torch.chunk`, then empty ones.

    Args:
        tensor: to be split.
        num_chunks: number of chunks; a chunk without elements is one-dimensional.
        dim: along which to split.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self.tensor = tensor
        self.pieces = num_chunks
        self.dim = dim
        self.step = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self.pieces

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(self.pieces)[index]]
        start = range(self.pieces)[index] * self.step
        left = self.tensor.size(self.dim) - start
        if self.step and left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.step, left))
