"""Large worlds: torch's loops over all ranks, reduced to the simulated rank's own part."""

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
    """While entered, what is made for all ranks of a world is made for this rank, and for others when it is asked for.

    A step then takes as long to simulate in a world of many thousand ranks as in a small one.
    """
    made: Callable[..., Any] = original(_NEW_GROUP)

    def new_group(ranks: Sequence[int], **options: Any) -> Any:
        # Of the groups along one axis of a mesh a rank is told to make all, and keeps the one that it is in.
        return made(ranks, **options) if dist.get_rank() in ranks else GroupMember.NON_GROUP_MEMBER

    with (
        patched(_NEW_GROUP, new_group),
        patched("torch.distributed.device_mesh:DeviceMesh.__eq__", _are_equal),
        patched("torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty", Chunks),
    ):
        yield


def _are_equal(mesh: DeviceMesh, other: object) -> bool:
    """Whether two meshes are equal; of those that are the ranks are compared once, and then are the same tuple."""
    if mesh is other:
        return True
    if not isinstance(other, DeviceMesh):
        return False
    if mesh._flatten_rank_map is not other._flatten_rank_map:
        if mesh._flatten_rank_map != other._flatten_rank_map:
            return False
        if type(other) is DeviceMesh:  # and not what stands for one while a program is compiled
            other._flatten_rank_map = mesh._flatten_rank_map
    return (
        mesh._layout == other._layout
        and mesh._device_type == other._device_type
        and mesh._mesh_dim_names == other._mesh_dim_names
        and mesh._thread_id == other._thread_id
    )


class Chunks(Sequence[torch.Tensor]):
    """The chunks of a tensor, one for each rank, each made when it is taken: `torch.chunk`, and behind it empty ones.

    Args:
        tensor: that is cut.
        num_chunks: into how many; one that is left without elements is empty, and of one dim.
        dim: along which.
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
