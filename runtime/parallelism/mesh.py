"""Meshes made from the axes of a plan's mesh, and coordinates of this rank on them."""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.torch_internals.distributed.meshes import concatenate, flatten, unflatten


def join_axes(mesh: DeviceMesh, *groups: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh that has one axis for each group of another mesh's axes.

    Args:
        mesh: with the names of its axes.
        groups: each in the order of the mesh; the first is the outermost axis of the result.

    Returns:
        A mesh whose axes have the joined names of their groups: `dp_shard_cp` for `("dp_shard", "cp")`.
    """
    joined = [mesh[axes] if len(axes) == 1 else flatten(mesh[axes], "_".join(axes)) for axes in groups]
    return joined[0] if len(joined) == 1 else concatenate(joined)


@functools.cache
def split_off_experts(mesh: DeviceMesh, *, ep: int) -> DeviceMesh:
    """Group neighbours on the innermost axis of a mesh: the ranks of a group hold different experts.

    Args:
        mesh: of the ranks that shard parameters, and of those that replicate them, if any.
        ep: ranks of a group; divides those of the innermost axis.

    Returns:
        The mesh with two axes instead of the innermost one, `axis`: `axis_mod_ep`, along which ranks hold the same
        experts, and `ep`. Equal arguments give the same mesh, since each mesh has process groups of its own.
    """
    axis = (mesh.mesh_dim_names or ())[-1]
    ranks = mesh.size(mesh.ndim - 1)
    assert ranks % ep == 0, f"{ep} does not divide the {ranks} ranks of {axis}"
    return unflatten(mesh, axis, (ranks // ep, ep), (f"{axis}_mod_ep", "ep"))


@functools.cache
def split_into_parts(mesh: DeviceMesh, *, ranks: int) -> DeviceMesh:
    """Group neighbours on the innermost axis of a mesh, such that each group holds full parameters between its ranks.

    Args:
        mesh: of the ranks that shard parameters, and of those that replicate them, if any.
        ranks: of a group; divides those of the innermost axis.

    Returns:
        The axis of these groups, the same mesh for equal arguments.
    """
    axis = (mesh.mesh_dim_names or ())[-1]
    names = f"{axis}_by_{ranks}", f"{axis}_of_{ranks}"
    return unflatten(mesh, axis, (mesh.size(mesh.ndim - 1) // ranks, ranks), names)[names[1]]


def forget_split_meshes() -> None:
    """Drop the meshes that were split off: they hold destroyed groups, and compare equal to meshes of later ones."""
    split_off_experts.cache_clear()
    split_into_parts.cache_clear()


def coordinate_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    """Return this rank's coordinate among the ranks of these axes together, the first axis outermost."""
    coordinate = 0
    for axis in axes:
        coordinate = coordinate * mesh[axis].size() + mesh.get_local_rank(axis)
    return coordinate


def is_first_elsewhere(mesh: DeviceMesh, axes: tuple[str, ...]) -> bool:
    """Return whether this rank is the first on every axis of the mesh but these."""
    return all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis not in axes)
