"""Lower bound of a pipeline's step time and recomputation, by the layers of its stages."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.block_bytes import BlockBytes
from legoai.cost.search.stages.stage_times import StageTimes, shape_of, weights_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches
from legoai.dsl.analysis.magnitudes.state import summed_gradients, unsharded_parameters
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import (
    first_modules,
    is_staged,
    most_stages,
    split_points,
    splits_backward,
    stage_count,
    stages_of_ranks,
)
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE, Even, OrderFile


def along_schedule(
    analysis: Analysis,
    times: StageTimes,
    forced: Sequence[float],
    besides: Callable[[float], float],
    adding_up: Callable[[float, bool], float],
) -> float:
    """The longest path through the schedule, or the busiest rank's own work with what comes before and after it.

    Args:
        analysis: of a plan whose stages and schedule are decided.
        times: of stages.
        forced: the least that each rank recomputes for one micro batch, if that is known.
        besides: seconds of a mean rank beside its layers, by the seconds for which it is idle.
        adding_up: seconds in which a rank adds up gradients, by their bytes and by whether backward is in halves.

    Raises:
        Undecided: it depends on a hole.
    """
    count, batches = stage_count(analysis), micro_batches(analysis.plan)
    if count is None or batches is None:
        return 0.0
    split, graph = splits_backward(analysis), graph_of(analysis)
    each = times.of_stages(analysis, first_modules(analysis), count, halves=split)
    longest = 0.0
    if graph is not None and graph.stages == count:
        longest = graph.time(
            [
                {"F": one.forward, "B": one.backward + one.recomputed, "I": one.of_inputs, "W": one.of_weights}
                for one in each
            ]
        )
    ranks, whole, idle = stages_of_ranks(analysis), 0.0, 0.0
    for rank, stages in enumerate(ranks):
        more = max(sum(each[stage].recomputed for stage in stages), forced[rank] if forced else 0.0)
        own = (sum(each[stage].forward + each[stage].backward for stage in stages) + more) * batches
        before = each[: min(stages)]
        fill = sum(one.forward for one in before)
        drain = 0.0 if split else sum(one.backward + one.recomputed for one in before)
        longest = max(longest, own + fill + drain)
        whole, idle = whole + own / len(ranks), idle + (fill + drain) / len(ranks)
    added = adding_up(summed_gradients(analysis) / len(ranks), split)
    return max(longest, whole + idle + besides(idle) + added)


@dataclass(frozen=True, slots=True)
class UnderSchedules:
    """Seconds and bytes of the busiest and the fullest rank under whatever schedule there may be; infinite if none."""

    seconds: float = 0.0
    bytes: float = 0.0


def under_any_schedule(
    analysis: Analysis,
    times: StageTimes,
    block: BlockBytes,
    besides: Callable[[float], float],
    adding_up: Callable[[float, bool], float],
) -> UnderSchedules:
    """Least time and memory of a pipeline with an even split, under whatever schedule its plan may come to have.

    A schedule decides how many stages there are, and which of them a rank holds. Whatever the order of its actions is,
    a rank computes all that its stages compute, and nothing before the first micro batch has passed the stages before
    its first one. Where a backward is not split, the last one of that stage is followed by those of the stages before.
    Each micro batch passes all stages forth and back, one after another.

    With one micro batch for each rank and more, the first rank comes to hold as many micro batches as there are ranks
    in each of its stages, or one less if it has one stage; and, with two for each rank and more or if it has one stage,
    gradients of all its stages meanwhile. In a V that is true of the last rank, which has gradients of both stages
    where there is a micro batch more than ranks. Under `LoopedBFS`, which takes one stage after the other, the first
    rank holds each micro batch in each of its stages before there are gradients. What then finds no room is recomputed
    by that rank, which computes no less than the least busy one.

    Args:
        analysis: of a plan whose mesh and batch are decided, and whose schedule may be open.
        times: of stages.
        block: bytes of a block.
        besides: as of :func:`along_schedule`.
        adding_up: likewise.

    Raises:
        Undecided: the split is open.
    """
    pipeline, ranks, batches = analysis.plan.pipeline, analysis.plan.mesh.pp, micro_batches(analysis.plan)
    if pipeline is None or ranks == 1 or batches is None:
        return UnderSchedules()
    schedule, split, known = pipeline.schedule, pipeline.split, split_points(analysis)
    listed = (schedule.domain or SINGLE_STAGE + MULTI_STAGE) if isinstance(schedule, Hole) else (schedule,)
    if any(isinstance(one, OrderFile) for one in listed) or not (isinstance(split, Even) or split == "even"):
        return UnderSchedules()
    of_pass, found = pass_micro_batches(analysis.plan) or 0, []
    summed = _summed(analysis)
    for shape in {shape_of(str(one), ranks, pipeline.stages) for one in listed}:
        count, v_shaped, halves, in_turn = shape
        if count > len(known.blocks):
            continue  # a stage has a block at least
        of_ranks = times.of_ranks(analysis, shape, batches)
        apart = halves and not is_traced(analysis)
        counts = known.even_counts(count, **weights_of(split))
        mean = of_ranks.computes + of_ranks.waits + besides(of_ranks.waits) + adding_up(summed / ranks, halves)
        added = 0.0 if halves else adding_up(min(counts) * count // ranks * block.gradients, False)
        busiest = max(of_ranks.busiest + added, mean, of_ranks.through)
        takes = 0.0
        if of_pass >= ranks and count in (ranks, 2 * ranks):
            all_summed = count == ranks or (not in_turn and (of_pass > ranks if v_shaped else of_pass >= 2 * ranks))
            at_once = [min(ranks, of_pass - 1) if count == ranks else of_pass if in_turn else ranks] * (count // ranks)
            fullest = counts[ranks - 1 : ranks + 1] if v_shaped else counts[::ranks]  # blocks of each of its stages
            held = sum(map(operator.mul, fullest, at_once))
            takes = block.between(sum(fullest), held, summed=all_summed, halves=apart)
            more = block.recomputed(fullest, at_once, first=not v_shaped, summed=all_summed, halves=apart)
            busiest = max(busiest, of_ranks.alone + added + batches * more)
        if takes <= block.room:
            found.append(UnderSchedules(busiest, takes))
    return UnderSchedules(
        min((one.seconds for one in found), default=math.inf), min((one.bytes for one in found), default=math.inf)
    )


def _summed(analysis: Analysis) -> int:
    """Bytes of the gradients of all modules that are added up over micro batches, as far as that is decided."""
    try:
        return summed_gradients(analysis)
    except Undecided:
        return 0


def held_between_backwards(analysis: Analysis, kept: int) -> int:
    """Bytes of unsharded gradients, parameters and activations of the fullest rank behind the first backward, at least.

    When the second backward of a stage begins, the stage has the summed gradients of the first, and what it keeps
    gathered; the fullest stage has no less than their mean. Where a schedule comes to have those of all stages of each
    rank at once, the fullest rank has no less than the mean of the ranks.

    Args:
        analysis: of a plan whose mesh and batch are decided.
        kept: bytes that one micro batch leaves on a rank, if the stages share it equally.

    Raises:
        Undecided: it depends on a hole.
    """
    plan, ranks, batches = analysis.plan, analysis.plan.mesh.pp, pass_micro_batches(analysis.plan)
    if not is_staged(analysis) or batches is None or batches == 1:
        return 0
    stages = most_stages(analysis)
    gradients = summed_gradients(analysis)
    try:
        parameters = unsharded_parameters(analysis)
    except Undecided:
        parameters = 0
    of_stage = (gradients + parameters + kept * ranks) // stages
    if stages == ranks or plan.pipeline is None or isinstance(plan.pipeline.schedule, Hole):
        return of_stage
    graph = graph_of(analysis)
    held = stages_of_ranks(analysis)
    at_once = graph is not None and all(
        any(moment.summed.issuperset(own) for moment in moments) for own, moments in zip(held, graph.held, strict=True)
    )
    return max(of_stage, gradients // ranks) if at_once else of_stage
