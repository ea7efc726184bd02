"""Lower bound of exposed FSDP2 communication in a step without a pipeline.

The model itself is the first unit of a forward and the last one of a backward: nothing computes before it is gathered,
and behind the backward nothing but its own reduction is left, before the next micro batch or the optimizer goes on.
"""

from __future__ import annotations

from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.communication.collectives import gathered_units, seconds_of_collective
from legoai.cost.search.lower_bounds.communication.units_in_backward import follows_hooks
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches


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
    seconds = 0.0
    for each in gathered_units(analysis, room):
        if "" in each.paths:
            gather = seconds_of_collective(analysis, machine, "all_gather", each.gathered)
            seconds += (batches if each.gathers >= batches else 1) * gather
            seconds += each.reductions * seconds_of_collective(analysis, machine, "reduce_scatter", each.reduced)
    return seconds
