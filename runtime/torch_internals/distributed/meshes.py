"""Private names of device meshes and of DTensor's placements."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

# The layout of a DTensor, to build one from its local tensor.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# How `fully_shard` places a parameter that tensor parallelism shards on the same dim.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["DTensorSpec", "StridedShard", "TensorMeta", "concatenate", "flatten", "unflatten"]


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh with one axis that has all ranks of a mesh."""
    return mesh._flatten(name)


def unflatten(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh with one axis replaced by several."""
    return mesh._unflatten(axis, sizes, names)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh that has the axes of several meshes of the same ranks, in their order."""
    return DeviceMesh._concatenate(list(meshes))
