"""Lower bound of exposed FSDP2 communication in a step without a pipeline.

The model itself is the first unit of a forward and the last one of a backward: before it is gathered nothing computes
but the kernels that cast and copy the next unit's shard for its own gather, and behind the backward nothing but its own
reduction is left, before the next micro batch or the optimizer goes on.
"""

from __future__ import annotations

from typing import Final

from legoai.cost.kernels.kinds import Movement
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.search.lower_bounds.communication.collectives import (
    GatheredUnits,
    gathered_units,
    seconds_of_collective,
)
from legoai.cost.search.lower_bounds.communication.units_in_backward import follows_hooks
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.parallelism.mesh import shard_ranks

_CAST: Final = 5
"""Bytes that a cast moves for each byte that is gathered, at most: from fp64 to 16 bits."""


def exposed(analysis: Analysis, machine: Machine, room: float) -> float:
    """Least seconds of a step in which nothing computes while the unit of the model itself is gathered or reduced.

    Args:
        analysis: of the plan.
        machine: on which it runs.
        room: bytes of active memory that a rank may take.

    Raises:
        Undecided: it depends on a hole.
        ProfileError: nothing is known of the links.
    """
    plan, batches = analysis.plan, micro_batches(analysis.plan)
    if plan.mesh.pp > 1 or batches is None or machine.device.kind == "cpu" or not follows_hooks(analysis):
        return 0.0
    seconds, units = 0.0, gathered_units(analysis, room)
    beside = max((_copied_for_gather(analysis, machine, each) for each in units if "" not in each.paths), default=0.0)
    for each in units:
        if "" in each.paths:
            gather = seconds_of_collective(analysis, machine, "all_gather", each.gathered)
            seconds += (batches if each.gathers >= batches else 1) * max(0.0, gather - beside)
            seconds += each.reductions * seconds_of_collective(analysis, machine, "reduce_scatter", each.reduced)
    return seconds


def _copied_for_gather(analysis: Analysis, machine: Machine, unit: GatheredUnits) -> float:
    """Most seconds in which a rank casts its shard of a unit and copies it for the gather."""
    moved = (_CAST * unit.gathered / shard_ranks(analysis), 2 * unit.gathered / shard_ranks(analysis))
    rate, gap = analysis.plan.precision.param, machine.constant("kernel_gap_seconds") or 0.0
    return sum(
        seconds_of(Movement(kind="copy", bytes=int(size), rate=rate), machine.profile)[0] + gap for size in moved
    )
