"""`mesh`: the function that builds the device mesh, and the submeshes that families use."""

from __future__ import annotations

from legoai.dsl.analysis.parallelism.mesh import mesh_axes, replicating_axes, sharded_axes
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Function, Line, Node, call, literal, quoted
from legoai.specs.directives.mesh import AXES


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_mesh`."""
    mesh = lowering.plan.mesh
    names = mesh_axes(lowering.analysis)
    draft.imports.name("torch.distributed.device_mesh", "DeviceMesh")
    draft.imports.name("torch.distributed.device_mesh", "init_device_mesh")
    made = call(
        "init_device_mesh",
        "device_type",
        literal([mesh.size(axis) for axis in names]),
        mesh_dim_names=literal(names),
    )
    draft.functions.append(
        Function("build_mesh(device_type: str) -> DeviceMesh", (Line(made, "return ", lowering.note(mesh)),))
    )
    draft.train_with("build_mesh", "build_mesh")


def sharding_mesh(lowering: Lowering, draft: Draft) -> Node:
    """Return the mesh of `fsdp`: the axis over which it shards, after the one over which it replicates, if any."""
    groups = (replicating_axes(lowering.analysis), sharded_axes(lowering.analysis))
    return joined(draft, *(group for group in groups if group))


def joined(draft: Draft, *groups: tuple[str, ...], mesh: str = "mesh", order: tuple[str, ...] = ()) -> Node:
    """Return the mesh with an axis for each group of a mesh's axes: a slice of it, or flattened axes.

    Args:
        draft: gets the import of what joins axes.
        groups: outermost first.
        mesh: the name of that mesh: the program's, or one made from it.
        order: the axes of the program's mesh of which the groups consist; by default, their own names.
    """
    order = order or tuple(axis for group in groups for axis in group)
    # torch slices a mesh only with the ranks of an outer axis farther apart than those of an inner one.
    if all(len(group) == 1 for group in groups) and order == tuple(sorted(order, key=AXES.index)):
        return f"{mesh}[{', '.join(quoted(axis) for group in groups for axis in group)}]"
    draft.imports.name("legoai.runtime.parallelism.mesh", "join_axes")
    return call("join_axes", mesh, *(literal(group) for group in groups))
