"""`mesh`: how are the devices laid out, and which ranks read different samples?"""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Function, Line, Node, call, literal, quoted
from legoai.specs.directives.mesh import AXES


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_mesh`, and the axes over which samples are spread."""
    mesh = lowering.plan.mesh
    _refuse_unreduced(lowering)
    names = axes(lowering)
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


def axes(lowering: Lowering) -> tuple[str, ...]:
    """The axes of the program's mesh, outermost first: those of several ranks, and those of `fsdp` or `replicate`.

    A mesh has at least one axis, so one device is `dp_shard` of size 1.
    """
    mesh, fsdp, replicate = lowering.plan.mesh, lowering.plan.fsdp, lowering.plan.replicate
    replicas = replicate.axes if fsdp is None and replicate is not None else ()
    kept = {*mesh.used(), *sharded_axes(lowering), *replicas}
    order = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    return tuple(axis for axis in order if axis in kept) or ("dp_shard",)


def data_axes(lowering: Lowering) -> tuple[str, ...]:
    """The axes of the program's mesh whose ranks read different samples, outermost first."""
    return tuple(axis for axis in axes(lowering) if axis in ("dp_replicate", "dp_shard"))


def sharding_mesh(lowering: Lowering, draft: Draft) -> Node:
    """The mesh of `fsdp`: one axis over which it shards, behind the one over which it replicates its shards, if any."""
    return joined(draft, *(group for group in (replicating_axes(lowering), sharded_axes(lowering)) if group))


def joined(draft: Draft, *groups: tuple[str, ...]) -> Node:
    """The mesh with an axis for each group of axes: cut out of the program's mesh, unless groups are joined."""
    order = tuple(axis for group in groups for axis in group)
    if all(len(group) == 1 for group in groups) and order == tuple(sorted(order, key=AXES.index)):
        return f"mesh[{', '.join(quoted(axis) for axis in order)}]"
    draft.imports.name("legoai.runtime.mesh", "join_axes")
    return call("join_axes", "mesh", *(literal(group) for group in groups))


def replicating_axes(lowering: Lowering) -> tuple[str, ...]:
    """The axes of several ranks over which `fsdp` replicates its shards.

    Those of `cp` hold the same parameters as well and see other tokens, also where the plan does not shard over them.
    """
    fsdp, mesh = lowering.plan.fsdp, lowering.plan.mesh
    if fsdp is None:
        return ()
    replicas = ("dp_replicate",) if "dp_replicate" in fsdp.axes and mesh.dp_replicate > 1 else ()
    return (*replicas, *(("cp",) if mesh.cp > 1 and "cp" not in fsdp.axes else ()))


def sharded_axes(lowering: Lowering) -> tuple[str, ...]:
    """The axes over which `fsdp` shards, outermost first: those of several ranks, or else the last one."""
    fsdp = lowering.plan.fsdp
    if fsdp is None:
        return ()
    shards = tuple(axis for axis in fsdp.axes if axis != "dp_replicate")
    return tuple(axis for axis in shards if lowering.plan.mesh.size(axis) > 1) or shards[-1:]


def _refuse_unreduced(lowering: Lowering) -> None:
    """Refuse ranks that read different samples and never learn each other's gradients."""
    plan = lowering.plan
    statements = [item for item in (plan.fsdp, plan.replicate) if item is not None]
    reduced = {axis for item in statements for axis in (*item.axes, "cp")}  # both reduce over `cp` by themselves
    for axis in ("dp_replicate", "dp_shard", "cp"):
        if plan.mesh.size(axis) > 1 and axis not in reduced:
            lowering.refuse(
                lowering.place(plan.mesh, axis),
                f"no statement reduces gradients over `{axis}` = {plan.mesh.size(axis)}",
                label="these ranks would train different models",
                help=[_REDUCED_BY[axis]],
            )


_REDUCED_BY = {
    "dp_replicate": "add `replicate on dp_replicate`, or `fsdp on dp_replicate, dp_shard`",
    "dp_shard": "add `fsdp on dp_shard`",
    "cp": "add `fsdp on cp`, or `fsdp on dp_shard`: ranks of `cp` hold the same parameters, and see other tokens",
}
