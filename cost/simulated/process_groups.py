"""Process groups of a simulated rank: their ranks, the mesh axes that they span, and their communicators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_OF_MESH: Final = "mesh_"
"""How the descriptions of the groups begin that a mesh creates for its axes."""
_UNNAMED: Final = "dim_"
"""How its axes begin where they have no names: FSDP's, over which `reshard = k` divides parameters after forward."""


class Group(NamedTuple):
    """A process group.

    Attributes:
        ranks: its global ranks.
        axis: the axes of the program's mesh that it spans, or part of which it is, or `ep`.
        communicator: name of its communicator; groups of the same ranks may have different ones.
    """

    ranks: tuple[int, ...]
    axis: str
    communicator: str


def group_of(group: dist.ProcessGroup, mesh: DeviceMesh) -> Group:
    """Return a process group of a program.

    Args:
        group: the process group.
        mesh: of the program.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    spanned, name = spanned_axes(ranks, mesh), ""
    if group.group_desc.startswith(_OF_MESH) and len(ranks) < dist.get_world_size():  # the whole world has one group
        name = group.group_desc.removeprefix(_OF_MESH)
    axis = name if name == "ep" else spanned or name
    if axis.startswith(_UNNAMED):
        axis = "+".join(_varying(ranks, mesh)) or axis
    return Group(ranks, axis, axis if name in ("", spanned.replace("+", "_")) else name)


def spanned_axes(ranks: Sequence[int], mesh: DeviceMesh) -> str:
    """Return the axes of a mesh along which ranks differ, joined by `+`; empty where they are no whole axes."""
    lengths = _varying(ranks, mesh)
    return "+".join(lengths) if math.prod(lengths.values()) == len(ranks) else ""


def _varying(ranks: Sequence[int], mesh: DeviceMesh) -> dict[str, int]:
    """Return the lengths of the axes of a mesh along which ranks differ, by name."""
    found, stride = {}, mesh.size()
    for name, length in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        stride //= length
        if len({rank // stride % length for rank in ranks}) > 1:
            found[name] = length
    return found
