"""Least seconds of a pipeline, and of what its ranks recompute, by the layers of its stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from legoai.cost.search.least_costs.local_kernels import Pass
from legoai.cost.search.least_costs.recomputation import (
    by_second_half,
)
from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.block_bytes import BlockBytes
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.graph import is_traced
from legoai.dsl.analysis.pipeline import (
    is_staged,
    most_stages,
    split_points,
    splits_backward,
    stage_count,
    stage_of,
    stages_of_ranks,
)
from legoai.dsl.analysis.state import summed_gradients_of_modules, unsharded_parameters_of_modules
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, Even, OrderFile


def along_schedule(
    analysis: Analysis,
    least: Mapping[str, Pass],
    recomputed: Mapping[str, float],
    forced: Sequence[float],
    besides: Callable[[float], float],
) -> float:
    """The longest path through the schedule, or the busiest rank's own work with what comes before and after it.

    Args:
        analysis: of a plan whose stages and schedule are decided.
        least: seconds of layers for one micro batch.
        recomputed: seconds of recomputation for one micro batch, by the recomputing module.
        forced: the least that each rank recomputes for one micro batch, if that is known.
        besides: seconds of a mean rank beside its layers, by the seconds for which it is idle.

    Raises:
        Undecided: it depends on a hole.
    """
    count, batches = stage_count(analysis), micro_batches(analysis.plan)
    if count is None or batches is None:
        return 0.0
    forward, backward, again = [0.0] * count, [0.0] * count, [0.0] * count
    for path, one in least.items():
        stage = stage_of(analysis, path)
        if stage is not None:
            forward[stage] += one.forward
            backward[stage] += one.backward
    split, graph = splits_backward(analysis), graph_of(analysis)
    apart = by_second_half(analysis, recomputed) if split and not is_traced(analysis) else {}
    for path, seconds in recomputed.items():
        stage = stage_of(analysis, path)
        if stage is not None:
            again[stage] += seconds + (apart.get(path, 0.0) if stage else 0.0)
    longest = 0.0
    if graph is not None and graph.stages == count:
        halves = _halves(analysis, least, recomputed, apart, count) if split else [{} for _ in range(count)]
        for stage, took in enumerate(halves):
            took |= {"F": forward[stage], "B": backward[stage] + again[stage]}
        longest, _ = graph.longest(halves)
    ranks, whole, idle = stages_of_ranks(analysis), 0.0, 0.0
    for rank, stages in enumerate(ranks):
        more = max(sum(again[stage] for stage in stages), forced[rank] if forced else 0.0)
        own = (sum(forward[stage] + backward[stage] for stage in stages) + more) * batches
        before = range(min(stages))
        fill = sum(forward[stage] for stage in before)
        drain = 0.0 if split else sum(backward[stage] + again[stage] for stage in before)
        longest = max(longest, own + fill + drain)
        whole, idle = whole + own / len(ranks), idle + (fill + drain) / len(ranks)
    return max(longest, whole + idle + besides(idle))


def _halves(
    analysis: Analysis,
    least: Mapping[str, Pass],
    recomputed: Mapping[str, float],
    apart: Mapping[str, float],
    count: int,
) -> list[dict[str, float]]:
    """Least seconds of the halves of each stage's backward.

    The gradients of a stage's inputs take a product of each linear layer and all of attention, which reads what was
    recomputed; the gradients of weights take the other product, and what is recomputed again for them. The first stage
    has no inputs with a gradient: all of its backward is in its second half.
    """
    halves = [{"I": 0.0, "W": 0.0} for _ in range(count)]
    if is_traced(analysis) or analysis.manifest is None:
        return halves
    for path, took in least.items():
        stage = stage_of(analysis, path)
        if stage is not None:
            halves[stage]["I" if stage else "W"] += took.of_inputs
            halves[stage]["W"] += took.of_weights
    for path, seconds in recomputed.items():
        stage = stage_of(analysis, path)
        if stage is not None and analysis.manifest.modules[path].kind != "linear":
            halves[stage]["I" if stage else "W"] += seconds
            halves[stage]["W"] += apart.get(path, 0.0) if stage else 0.0
    return halves


@dataclass(frozen=True, slots=True)
class UnderSchedules:
    """Seconds and bytes of the busiest and the fullest rank under whatever schedule there may be; infinite if none."""

    seconds: float = 0.0
    bytes: float = 0.0


def under_any_schedule(
    analysis: Analysis,
    least: Mapping[str, Pass],
    recomputed: Mapping[str, float],
    block: BlockBytes,
    besides: Callable[[float], float],
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
        least: seconds of layers for one micro batch.
        recomputed: seconds of recomputation for one micro batch, by the recomputing module.
        block: bytes of a block.
        besides: as of :func:`along_schedule`.

    Raises:
        Undecided: the split is open.
    """
    pipeline, ranks, batches = analysis.plan.pipeline, analysis.plan.mesh.pp, micro_batches(analysis.plan)
    if pipeline is None or ranks == 1 or batches is None:
        return UnderSchedules()
    schedule, split, known = pipeline.schedule, pipeline.split, split_points(analysis)
    listed = (schedule.domain or SINGLE_STAGE + MULTI_STAGE) if isinstance(schedule, Hole) else (schedule,)
    weights = {"embedding": split.embedding, "loss": split.loss} if isinstance(split, Even) else {}
    if any(isinstance(one, OrderFile) for one in listed) or not (weights or split == "even"):
        return UnderSchedules()
    of_pass, found = pass_micro_batches(analysis.plan) or 0, []
    computes, of_inputs, again = _to_starts(analysis, least, recomputed)
    for count, v_shaped, halves, in_turn in {_shape(str(one), ranks, pipeline.stages) for one in listed}:
        if count > len(known.blocks):
            continue  # a stage has a block at least
        counts = known.even_counts(count, **weights)
        edges = [0, *(known.position[point] for point in known.counted(counts)), len(known.starts)]
        forward, backward = ([to[edge] for edge in edges] for to in computes)
        extra = [again[edge] for edge in edges]
        apart = halves and not is_traced(analysis)
        through = forward[-1] + backward[-1]
        if halves:  # the gradients of most weights come behind, whose half is known of eager programs only
            through = forward[-1] + (backward[1] + of_inputs[-1] - of_inputs[edges[1]] if apart else 0.0)
        alone, busiest, whole, idle = math.inf, 0.0, 0.0, 0.0
        for rank in range(ranks):
            held = (rank, count - 1 - rank) if v_shaped else range(rank, count, ranks)
            own = sum(forward[one + 1] - forward[one] + backward[one + 1] - backward[one] for one in held)
            more = sum(extra[one + 1] - extra[one] for one in held)
            first = min(held)
            ends = forward[first] + (0.0 if halves else backward[first])
            alone = min(alone, batches * own + ends)
            ends += 0.0 if halves else extra[first]
            busiest = max(busiest, batches * (own + more) + ends)
            whole, idle = whole + batches * (own + more) / ranks, idle + ends / ranks
        busiest = max(busiest, whole + idle + besides(idle), through)
        takes = 0.0
        if of_pass >= ranks and count in (ranks, 2 * ranks):
            each = min(counts)  # blocks of a stage
            summed = count == ranks or (not in_turn and (of_pass > ranks if v_shaped else of_pass >= 2 * ranks))
            at_once = [min(ranks, of_pass - 1) if count == ranks else of_pass if in_turn else ranks] * (count // ranks)
            takes = block.between(each * count // ranks, each * sum(at_once), summed=summed, halves=apart)
            more = block.recomputed(each, at_once, first=not v_shaped, summed=summed, halves=apart)
            busiest = max(busiest, alone + batches * more)
        if takes <= block.room:
            found.append(UnderSchedules(busiest, takes))
    return UnderSchedules(
        min((one.seconds for one in found), default=math.inf), min((one.bytes for one in found), default=math.inf)
    )


def _to_starts(
    analysis: Analysis, least: Mapping[str, Pass], recomputed: Mapping[str, float]
) -> tuple[tuple[list[float], list[float]], list[float], list[float]]:
    """Seconds of all that comes before each start of a stage: of forward and backward, of inputs', and recomputed."""
    count, places = len(split_points(analysis).starts), _places(analysis)
    forward, backward, inputs, again = ([0.0] * count for _ in range(4))
    for path, took in least.items():
        if path in places:
            forward[places[path]] += took.forward
            backward[places[path]] += took.backward
            inputs[places[path]] += took.of_inputs
    for path, seconds in recomputed.items():
        if path in places:
            again[places[path]] += seconds
    to_start = [[0.0, *itertools.accumulate(one)] for one in (forward, backward, inputs, again)]
    return (to_start[0], to_start[1]), to_start[2], to_start[3]


def _shape(schedule: str, ranks: int, stages: int | None) -> tuple[int, bool, bool, bool]:
    """What a schedule of torch decides.

    How many stages there are, whether ranks hold them in a V, whether backward is in halves, and whether a rank takes
    one stage after the other.
    """
    count = stages if stages is not None else ranks * (1 if schedule in SINGLE_STAGE else 2)
    return count, schedule in V_SHAPED, schedule in SPLIT_BACKWARD, schedule == "LoopedBFS"


@fact
def _places(analysis: Analysis) -> dict[str, int]:
    """The place of each module among those with which a stage can begin; none of what is around them."""
    assert analysis.manifest is not None
    known = split_points(analysis)
    starts = ((path, known.holder(path)) for path in analysis.manifest.modules)
    return {path: known.position[start] for path, start in starts if start is not None}


def held_between_backwards(analysis: Analysis, kept: int) -> int:
    """Bytes of unsharded gradients, parameters and activations of the fullest rank behind the first backward, at least.

    When the second backward of a stage begins, the stage has the summed gradients of the first, and what it keeps
    gathered; the fullest stage has no less than their mean. Where a schedule comes to have those of all stages of each
    rank at once, the fullest rank has no less than the mean of the ranks.

    Args:
        analysis: of a plan whose mesh and batch are decided.
        kept: bytes that one micro batch leaves on a rank, if all stages share it alike.

    Raises:
        Undecided: it depends on a hole.
    """
    plan, ranks, batches = analysis.plan, analysis.plan.mesh.pp, pass_micro_batches(analysis.plan)
    if not is_staged(analysis) or batches is None or batches == 1:
        return 0
    stages = most_stages(analysis)
    gradients = sum(summed_gradients_of_modules(analysis).values())
    try:
        parameters = sum(unsharded_parameters_of_modules(analysis).values())
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
