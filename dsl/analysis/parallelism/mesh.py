"""Axes of the program's mesh, and those over which `fsdp` shards and replicates."""

from __future__ import annotations

import math

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.mesh import DATA_AXES


@fact
def mesh_axes(analysis: Analysis) -> tuple[str, ...]:
    """The axes of the program's mesh, outermost first: those of several ranks, and those of `fsdp` or `replicate`.

    A mesh has at least one axis, so one device is `dp_shard` of size 1.
    """
    mesh, fsdp, replicate = analysis.plan.mesh, analysis.plan.fsdp, analysis.plan.replicate
    replicas = replicate.axes if fsdp is None and replicate is not None else ()
    kept = {*mesh.used(), *sharded_axes(analysis), *replicas}
    order = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    return tuple(axis for axis in order if axis in kept) or ("dp_shard",)


def data_axes(analysis: Analysis) -> tuple[str, ...]:
    """The axes of the program's mesh whose ranks read different samples, outermost first."""
    return tuple(axis for axis in mesh_axes(analysis) if axis in DATA_AXES)


@fact
def sharded_axes(analysis: Analysis) -> tuple[str, ...]:
    """The axes over which `fsdp` shards, outermost first: those of several ranks, or else the last one."""
    fsdp = analysis.plan.fsdp
    if fsdp is None:
        return ()
    shards = tuple(axis for axis in fsdp.axes if axis != "dp_replicate")
    return tuple(axis for axis in shards if analysis.plan.mesh.size(axis) > 1) or shards[-1:]


@fact
def replicating_axes(analysis: Analysis) -> tuple[str, ...]:
    """Return the axes of several ranks over which `fsdp` replicates its shards.

    Ranks of `cp` hold the same parameters too, and see other tokens, even where the plan does not shard over them.
    """
    fsdp, mesh = analysis.plan.fsdp, analysis.plan.mesh
    if fsdp is None:
        return ()
    replicas = ("dp_replicate",) if "dp_replicate" in fsdp.axes and mesh.dp_replicate > 1 else ()
    return (*replicas, *(("cp",) if mesh.cp > 1 and "cp" not in fsdp.axes else ()))


def shard_ranks(analysis: Analysis) -> int:
    """Ranks over which a unit of `fsdp` is sharded; 1 without `fsdp`."""
    return math.prod(analysis.plan.mesh.size(axis) for axis in sharded_axes(analysis))


def devices_per_host(analysis: Analysis) -> int | None:
    """Devices in one host; None where neither the plan nor the device says it."""
    return analysis.plan.cluster.devices_per_host(analysis.directory)


def number_of_devices(analysis: Analysis) -> int | None:
    """Devices in all hosts; None where neither the plan nor the device says it.

    Raises:
        Undecided: the cluster is a hole.
    """
    return analysis.plan.cluster.number_of_devices(analysis.directory)


def all_ranks(analysis: Analysis) -> int:
    """Ranks of the mesh, which are as many as the cluster's devices where axes are open.

    Raises:
        Undecided: the cluster is a hole.
    """
    try:
        return analysis.plan.mesh.world_size
    except Undecided:
        devices = number_of_devices(analysis)
        if devices is None:
            raise
        return devices
