"""Lower bound of exposed FSDP2 communication in a step without a pipeline.

The model itself is the first unit of a forward and the last one of a backward: nothing computes before it is gathered,
and behind the backward nothing but its own reduction is left, before the next micro batch or the optimizer goes on.

In forward each block is gathered while the one before it computes, if that can begin in time. What is gathered is first
copied by a kernel, for which there is no room on the device while others wait that were issued before it: it runs when
all blocks before it are done, or while these wait for the gather before its own. The gather of a block that is not
waited for, as it began that early, is over before the next kernels stop, if a block takes longer than a gather. So of
two gathers one after the other one at least is waited for from its beginning to its end.
"""

from __future__ import annotations

from typing import NamedTuple

from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.communication.collectives import (
    GatheredUnits,
    gathered_units,
    seconds_of_collective,
)
from legoai.cost.search.lower_bounds.communication.units_in_backward import follows_hooks
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches


class Exposed(NamedTuple):
    """Least seconds of a step in which nothing computes while units are gathered or reduced."""

    of_model: float = 0.0
    of_blocks: float = 0.0


def exposed(analysis: Analysis, machine: Machine, room: float, forward: float) -> Exposed:
    """Least seconds of a step, for the unit of the model itself and for those of its blocks.

    Args:
        analysis: of the plan.
        machine: on which it runs.
        room: bytes of active memory that a rank may take.
        forward: least seconds of a block's forward; 0 where blocks differ, or it is not known.

    Raises:
        Undecided: it depends on a hole.
        ProfileError: nothing is known of the links.
    """
    plan, batches = analysis.plan, micro_batches(analysis.plan)
    if plan.mesh.pp > 1 or batches is None or machine.device.kind == "cpu" or not follows_hooks(analysis):
        return Exposed()
    of_model = of_blocks = 0.0
    for each in gathered_units(analysis, room):
        forwards = batches if each.gathers >= batches else 1
        gather = seconds_of_collective(analysis, machine, "all_gather", each.gathered)
        if "" in each.paths:
            of_model += forwards * gather
            of_model += each.reductions * seconds_of_collective(analysis, machine, "reduce_scatter", each.reduced)
        elif gather <= forward and not _waits_for_others(analysis):
            of_blocks += forwards * gather * _pairs(analysis, each)
    return Exposed(of_model, of_blocks)


def _waits_for_others(analysis: Analysis) -> bool:
    """Whether blocks may wait for other collectives in forward, while which the next gather could begin."""
    return analysis.plan.mesh.tp > 1 or analysis.plan.mesh.cp > 1


def _pairs(analysis: Analysis, unit: GatheredUnits) -> int:
    """Pairs of blocks that follow each other and are such units; but one, beside which others may communicate first."""
    assert analysis.manifest is not None
    lists, own = analysis.manifest.block_lists, frozenset(unit.paths)
    places = [place for item in lists[:1] for place, path in enumerate(item.paths) if path in own]
    return max(0, len(places) // 2 - 1) if places and places == list(range(places[0], places[-1] + 1)) else 0
