"""Lower bounds of a pipeline's step time, recomputation and memory, from the layers of its stages."""

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
    """Lower bound of the step time, in seconds: the maximum of three.

    These are the longest path through the schedule; the computation of the busiest rank with the fill before its first
    micro batch and the drain after its last; and the same of a mean rank with its work outside the layers.

    Args:
        analysis: analysis of a plan whose stages and schedule are decided.
        times: least seconds of stages.
        forced: least seconds that each rank recomputes per micro batch, where known.
        besides: seconds of a mean rank outside its layers, as a function of its idle seconds.
        adding_up: seconds of a rank's gradient accumulation, as a function of the gradients' bytes and of whether
            backward is split.

    Raises:
        Undecided: the bound depends on a hole.
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
    """Lower bounds of step time and peak memory over all schedules, each by itself; infinite if none fits."""

    seconds: float = 0.0
    bytes: float = 0.0


def under_any_schedule(
    analysis: Analysis,
    times: StageTimes,
    block: BlockBytes,
    besides: Callable[[float], float],
    adding_up: Callable[[float, bool], float],
) -> UnderSchedules:
    """Lower bounds of the step time and peak memory of a pipeline with an even split, over all schedules of its plan.

    A schedule decides the number of stages and the ranks that hold them. For any order of its actions:

    - A rank runs all actions of its stages. It starts after the first micro batch has passed the stages before its
      first stage. If backward is not split, the last backward of that stage is followed by those of earlier stages.
    - Each micro batch runs the forwards and then the backwards of all stages one after another.
    - If a pass has at least as many micro batches as the pipeline has ranks, the first rank reaches a state with one
      micro batch in flight per rank in each of its stages, or one less if it has one stage. All its stages have
      accumulated gradients in that state if there are twice as many micro batches as ranks, or if it has one stage.
    - In a V-shaped schedule the same is true of the last rank, whose stages both have gradients if there are more micro
      batches than ranks.
    - Under `LoopedBFS`, which runs one stage after another, all micro batches are in flight in each stage of the first
      rank before it has gradients.

    Activations beyond the memory limit in that state are recomputed by that rank, whose other computation is at least
    that of the least busy rank.

    Args:
        analysis: analysis of a plan whose mesh and batch are decided; its schedule may be open.
        times: least seconds of stages.
        block: bytes of a block.
        besides: as for :func:`along_schedule`.
        adding_up: as for :func:`along_schedule`.

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
            continue  # each stage has at least one block
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
            fullest = counts[ranks - 1 : ranks + 1] if v_shaped else counts[::ranks]  # blocks of the rank's stages
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
    """Bytes of the accumulated gradients of all modules; 0 where that is not decided."""
    try:
        return summed_gradients(analysis)
    except Undecided:
        return 0


def held_between_backwards(analysis: Analysis, kept: int) -> int:
    """Least bytes of unsharded gradients, parameters and activations on a rank, between two backwards of a stage.

    When the second backward of a stage begins, the stage has the gradients of the first one and the parameters that
    stay unsharded. The largest stage has at least the mean of the stages. Under a schedule that reaches a state with
    the gradients of all stages of each rank, the largest rank has at least the mean of the ranks.

    Args:
        analysis: analysis of a plan whose mesh and batch are decided.
        kept: bytes of activations of one micro batch on a mean rank.

    Raises:
        Undecided: the bound depends on a hole.
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
