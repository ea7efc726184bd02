"""`mesh`: the function that makes the device mesh, and the parts of it that families use."""

from __future__ import annotations

from legoai.dsl.analysis.mesh import mesh_axes, replicating_axes, sharded_axes
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
    """The mesh of `fsdp`: one axis over which it shards, behind the one over which it replicates its shards, if any."""
    groups = (replicating_axes(lowering.analysis), sharded_axes(lowering.analysis))
    return joined(draft, *(group for group in groups if group))


def joined(draft: Draft, *groups: tuple[str, ...]) -> Node:
    """The mesh with an axis for each group of axes: cut out of the program's mesh, unless groups are joined."""
    order = tuple(axis for group in groups for axis in group)
    if all(len(group) == 1 for group in groups) and order == tuple(sorted(order, key=AXES.index)):
        return f"mesh[{', '.join(quoted(axis) for axis in order)}]"
    draft.imports.name("legoai.runtime.mesh", "join_axes")
    return call("join_axes", "mesh", *(literal(group) for group in groups))
