"""Least seconds of a pipeline, and of what its ranks recompute, by the layers of its stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from legoai.cost.search.least_costs.local_kernels import Pass
from legoai.cost.search.least_costs.recomputation import Output, least_recomputed
from legoai.cost.search.stages.action_graph import graph_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.facts import holders
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
from legoai.specs.directives.pipeline import OrderFile


def along_schedule(analysis: Analysis, least: Mapping[str, Pass], recomputed: Mapping[str, float]) -> float:
    """The longest path through the schedule, or the busiest rank's own work with what comes before and after it.

    Args:
        analysis: of a plan whose stages and schedule are decided.
        least: seconds of layers for one micro batch.
        recomputed: seconds of recomputation for one micro batch, by the recomputing module.

    Raises:
        Undecided: it depends on a hole.
    """
    count, batches = stage_count(analysis), micro_batches(analysis.plan)
    if count is None or batches is None:
        return 0.0
    forward, backward = [0.0] * count, [0.0] * count
    for path, took in least.items():
        stage = stage_of(analysis, path)
        if stage is not None:
            forward[stage] += took.forward
            backward[stage] += took.backward
    for path, again in recomputed.items():
        stage = stage_of(analysis, path)
        if stage is not None:
            backward[stage] += again
    split, graph = splits_backward(analysis), graph_of(analysis)
    longest = 0.0
    if graph is not None and graph.stages == count:
        halves = {"I": 0.0, "W": 0.0} if split else {}
        longest, _ = graph.longest([{"F": f, "B": b, **halves} for f, b in zip(forward, backward, strict=True)])
    for stages in stages_of_ranks(analysis):
        own = sum(forward[stage] + backward[stage] for stage in stages) * batches
        before = range(min(stages))
        fill = sum(forward[stage] for stage in before)
        drain = 0.0 if split else sum(backward[stage] for stage in before)
        longest = max(longest, own + fill + drain)
    return longest


def in_even_split(analysis: Analysis, least: Mapping[str, Pass], recomputed: Mapping[str, float]) -> float:
    """Seconds of the busiest or the last rank of a pipeline with an even split, under any schedule of torch.

    These have one stage on each rank, or two, and the last rank holds none of the first stages, one for each other
    rank: it begins when the first micro batch has passed them.

    Args:
        analysis: of a plan whose mesh and batch are decided, and whose schedule may be open.
        least: seconds of layers for one micro batch.
        recomputed: seconds of recomputation for one micro batch, by the recomputing module.

    Raises:
        Undecided: the split is open.
    """
    pipeline, ranks, batches = analysis.plan.pipeline, analysis.plan.mesh.pp, micro_batches(analysis.plan)
    if pipeline is None or ranks == 1 or batches is None or pipeline.stages is not None or pipeline.split != "even":
        return 0.0
    schedule, known = pipeline.schedule, split_points(analysis)
    blocks = known.blocks
    listed = (schedule.domain or ()) if isinstance(schedule, Hole) else (schedule,)
    if any(isinstance(one, OrderFile) for one in listed) or not blocks:
        return 0.0
    forward, backward = dict.fromkeys(blocks, 0.0), dict.fromkeys(blocks, 0.0)
    for path, took in least.items():
        block = next((one for one in (path, *holders(path)) if one in forward), None)
        if block is not None:
            forward[block] += took.forward
            backward[block] += took.backward
    for path, again in recomputed.items():
        if path in backward:
            backward[path] += again
    first, second = min(forward.values()), min(backward.values())
    busiest = math.ceil(len(blocks) / ranks) * batches * (first + second)
    stages = [number for number in (1, 2) if number * ranks <= len(blocks)]
    if not isinstance(schedule, Hole):
        stages = [number for number in stages if number * ranks == stage_count(analysis)]
    last = []
    for number in stages:
        counts = known.even_counts(number * ranks)
        # Of two stages the second is the last one, or the next.
        second_stage = min(counts[-1], counts[ranks]) if number > 1 else 0
        own = batches * (counts[ranks - 1] + second_stage) * (first + second)
        last.append(sum(counts[: ranks - 1]) * first + own)
    return max(busiest, min(last, default=math.inf))  # a rank has a block at least


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


def recomputed_in_stages(analysis: Analysis, block: Sequence[Output], given: float, room: float, held: float) -> float:
    """Least seconds that all ranks recompute of one micro batch, since memory cannot keep all; 0 if not known.

    Args:
        analysis: of a plan with an even split, whose blocks are alike.
        block: the outputs of a block that its backward reads.
        given: bytes of its input, which is kept.
        room: bytes of active memory of a rank.
        held: of these, bytes that parameters and optimizer state of a mean rank take.

    Raises:
        Undecided: the schedule is open.
    """
    pipeline, count = analysis.plan.pipeline, stage_count(analysis)
    graph = graph_of(analysis) if pipeline is not None and pipeline.split == "even" else None
    if graph is None or count is None or graph.stages != count:
        return 0.0
    blocks = split_points(analysis).blocks
    each = len(blocks) // count
    room -= held * _share_of_blocks(analysis) * each * count / len(blocks)
    recomputed = 0.0
    for moments in graph.held:
        most = 0.0
        for moment in moments:
            held_now = moment.micro_batches.values()
            outputs = [Output(each * one.seconds, number * each * one.bytes) for number in held_now for one in block]
            most = max(most, least_recomputed(outputs, room - sum(held_now) * each * given))
        recomputed += most
    return recomputed


@fact
def _share_of_blocks(analysis: Analysis) -> float:
    """Share of the model's parameters that lie in blocks."""
    assert analysis.manifest is not None
    blocks = tuple(f"{path}." for path in split_points(analysis).blocks)
    sizes = [(name.startswith(blocks), math.prod(shape)) for name, shape in analysis.manifest.parameters()]
    return sum(size for inside, size in sizes if inside) / sum(size for _, size in sizes)
