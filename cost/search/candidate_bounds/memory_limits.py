"""Limits of the memory of a candidate's ranks: of the device, of `require`, and of what is left for tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from legoai.cost.machine.cluster import Machine
from legoai.cost.memory.use import least_beside
from legoai.cost.search.stages.costs import Room
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.shard import shard_on_tp
from legoai.specs.directives.hole import Hole, Undecided


def room_of(analysis: Analysis, machine: Machine) -> Room:
    """Bytes that a rank may take, by its device and by what the plan requires."""
    capacity = machine.device.capacity
    required: dict[str, float] = {}
    for item in analysis.plan.require:
        if item.bounds_above:
            required[item.metric] = min(item.bound, required.get(item.metric, math.inf))
    return Room(
        device=math.inf if capacity is None else capacity,
        active=required.get("peak_memory", math.inf),
        reserved=required.get("reserved_memory", math.inf),
    )


def for_tensors(analysis: Analysis, machine: Machine) -> float:
    """Bytes of active memory that a rank may take, beside what it takes of its device for anything else."""
    room, beside = room_of(analysis, machine), least_beside(machine, _groups(analysis))
    return min(room.device - beside, room.active, room.reserved)


def _groups(analysis: Analysis) -> Iterator[int]:
    """The ranks of each group in which a rank communicates, as far as they are decided."""
    tp = analysis.plan.mesh.tp
    with contextlib.suppress(Undecided):
        yield shard_ranks(analysis)
    if not isinstance(tp, Hole) and shard_on_tp(analysis) is not None:
        yield tp
