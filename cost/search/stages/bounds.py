"""Least seconds of a pipeline, and of what its ranks recompute, by the layers of its stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from legoai.cost.search.least_costs.collectives import elements_of_units
from legoai.cost.search.least_costs.local_kernels import Pass
from legoai.cost.search.least_costs.recomputation import Output, least_recomputed
from legoai.cost.search.stages.action_graph import graph_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.mesh import shard_ranks
from legoai.dsl.analysis.pipeline import (
    is_staged,
    most_stages,
    split_points,
    splits_backward,
    stage_count,
    stage_of,
    stages_of_ranks,
)
from legoai.dsl.analysis.precision import DTYPE_BYTES
from legoai.dsl.analysis.state import summed_gradients_of_modules, unsharded_parameters_of_modules
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, Even, OrderFile


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes that blocks of a pipeline take on a rank at least, if all are alike, and what may be recomputed of one.

    Attributes:
        state: of a block's parameters and optimizer state, in shards.
        gradients: of a block's gradients, which are added up over micro batches.
        parameters: of a block's parameters that stay gathered.
        gathered: of those that are gathered for the one block that computes.
        given: of a block's input for one micro batch, which is kept.
        kept: of all that is kept of a block for one micro batch under a plan's treatments, its input included.
        outputs: that the backward of a block reads.
        room: of active memory on a rank.
    """

    state: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    gathered: float = 0.0
    given: float = 0.0
    kept: float = 0.0
    outputs: Sequence[Output] = ()
    room: float = math.inf

    def between(self, blocks: int, held: int, *, summed: bool) -> float:
        """Those of a rank with some blocks that holds micro batches between their forward and their backward.

        Args:
            blocks: of the rank.
            held: blocks that hold a micro batch, one counted for each of these.
            summed: whether all blocks have gradients.
        """
        of_blocks = self.state + self.parameters + (self.gradients if summed else 0.0)
        return blocks * of_blocks + self.gathered + held * max(self.given, self.kept)

    def recomputed(self, blocks: int, held: int, *, summed: bool) -> float:
        """Least seconds that such a rank recomputes of each micro batch, whatever the treatments are."""
        left = self.room - blocks * (self.state + (self.gradients if summed else 0.0)) - self.gathered
        outputs = [Output(blocks * one.seconds, held * one.bytes) for one in self.outputs]
        return least_recomputed(outputs, left - held * self.given)


@dataclass(frozen=True, slots=True)
class UnderSchedules:
    """Seconds and bytes of the busiest and the fullest rank under whatever schedule there may be; infinite if none."""

    seconds: float = 0.0
    bytes: float = 0.0


def under_any_schedule(
    analysis: Analysis, least: Mapping[str, Pass], recomputed: Mapping[str, float], block: BlockBytes
) -> UnderSchedules:
    """Least time and memory of a pipeline with an even split, under whatever schedule its plan may come to have.

    A schedule decides how many stages there are, and which of them a rank holds. Whatever the order of its actions is,
    a rank computes all that its stages compute, and nothing before the first micro batch has passed the stages before
    its first one. Where a backward is not split, the last one of that stage is followed by those of the stages before.

    With two micro batches for each rank and more, the first rank comes to hold as many pairs of a micro batch and a
    stage as there are stages, and gradients of all its stages; with one for each rank the same where stages are dealt
    in turn, and half as many in a V, but gradients only where it has one stage, as the backward of one micro batch is
    over then. Under `LoopedBFS`, which takes one stage after the other, it holds each micro batch in each of its stages
    before there are gradients. What then finds no room is recomputed by that rank, which computes no less than the
    least busy one.

    Args:
        analysis: of a plan whose mesh and batch are decided, and whose schedule may be open.
        least: seconds of layers for one micro batch.
        recomputed: seconds of recomputation for one micro batch, by the recomputing module.
        block: bytes of a block.

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
    computes, again = _to_starts(analysis, least, recomputed)
    for count, v_shaped, halves, in_turn in {_shape(str(one), ranks, pipeline.stages) for one in listed}:
        if count > len(known.blocks):
            continue  # a stage has a block at least
        counts = known.even_counts(count, **weights)
        edges = [0, *(known.position[point] for point in known.counted(counts)), len(known.starts)]
        forward, backward = ([to[edge] for edge in edges] for to in computes)
        extra = [again[edge] for edge in edges]
        alone, busiest = math.inf, 0.0
        for rank in range(ranks):
            held = (rank, count - 1 - rank) if v_shaped else range(rank, count, ranks)
            own = sum(forward[one + 1] - forward[one] + backward[one + 1] - backward[one] for one in held)
            more = sum(extra[one + 1] - extra[one] for one in held)
            first = min(held)
            ends = forward[first] + (0.0 if halves else backward[first])
            alone = min(alone, batches * own + ends)
            busiest = max(busiest, batches * (own + more) + ends + (0.0 if halves else extra[first]))
        takes = 0.0
        two_rounds = of_pass >= 2 * ranks
        if of_pass >= ranks and count in (ranks, 2 * ranks):
            each = min(counts)  # blocks of a stage
            summed = count == ranks or (two_rounds and not in_turn)
            pairs = of_pass * count // ranks if in_turn else min(count, of_pass - 1) if count == ranks else count
            if v_shaped and not two_rounds:
                pairs = ranks
            of_rank, at_once = each * count // ranks, each * pairs
            takes = block.between(of_rank, at_once, summed=summed)
            busiest = max(busiest, alone + batches * block.recomputed(of_rank, at_once, summed=summed))
        if takes <= block.room:
            found.append(UnderSchedules(busiest, takes))
    return UnderSchedules(
        min((one.seconds for one in found), default=math.inf), min((one.bytes for one in found), default=math.inf)
    )


def _to_starts(
    analysis: Analysis, least: Mapping[str, Pass], recomputed: Mapping[str, float]
) -> tuple[tuple[list[float], list[float]], list[float]]:
    """Seconds of forward, backward and recomputation of all that comes before each start of a stage."""
    count, places = len(split_points(analysis).starts), _places(analysis)
    forward, backward, again = [0.0] * count, [0.0] * count, [0.0] * count
    for path, took in least.items():
        if path in places:
            forward[places[path]] += took.forward
            backward[places[path]] += took.backward
    for path, seconds in recomputed.items():
        if path in places:
            again[places[path]] += seconds
    to_start = [[0.0, *itertools.accumulate(one)] for one in (forward, backward, again)]
    return (to_start[0], to_start[1]), to_start[2]


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


def block_bytes(
    analysis: Analysis, *, state: float, outputs: Sequence[Output], given: float, kept: float, room: float
) -> BlockBytes:
    """Bytes of the blocks of a pipeline on one rank, where all of them are alike; else none are told.

    Args:
        analysis: of a plan whose mesh and batch are decided.
        state: of the parameters and optimizer state of a mean rank, in shards.
        outputs: that the backward of a block reads.
        given: of a block's input for one micro batch.
        kept: of what is kept of a block for one micro batch, as far as that is decided.
        room: of active memory on a rank.

    Raises:
        Undecided: it depends on another hole.
    """
    blocks, ranks = split_points(analysis).blocks, analysis.plan.mesh.pp
    try:
        parameters = _parameters_of_block(analysis)
    except Undecided:
        parameters = 0.0
    elements = elements_of_units(analysis) if analysis.plan.fsdp is not None and shard_ranks(analysis) > 1 else {}
    gathered = min((elements.get(path, 0) for path in blocks), default=0) * DTYPE_BYTES[analysis.plan.precision.param]
    return BlockBytes(
        gathered=0.0 if parameters or analysis.plan.precision.rules else gathered,
        state=state * _share_of_blocks(analysis) * ranks / len(blocks),
        gradients=_gradients_of_block(analysis),
        parameters=parameters,
        given=given,
        kept=kept,
        outputs=outputs,
        room=room,
    )


@fact
def _gradients_of_block(analysis: Analysis) -> float:
    return _of_least_block(analysis, summed_gradients_of_modules(analysis))


@fact
def _parameters_of_block(analysis: Analysis) -> float:
    return _of_least_block(analysis, unsharded_parameters_of_modules(analysis))


def _of_least_block(analysis: Analysis, of_modules: Mapping[str, int]) -> float:
    """Bytes of a block that has the least, of what modules have."""
    of_blocks = dict.fromkeys(split_points(analysis).blocks, 0.0)
    for path, size in of_modules.items():
        block = split_points(analysis).holder(path)
        if block in of_blocks:
            of_blocks[block] += size
    return min(of_blocks.values(), default=0.0)
