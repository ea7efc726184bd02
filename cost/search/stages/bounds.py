"""Least seconds of a pipeline, and of what its ranks recompute, by the layers of its stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from legoai.cost.search.least_costs.collectives import elements_of_units
from legoai.cost.search.least_costs.local_kernels import Pass
from legoai.cost.search.least_costs.recomputation import (
    Output,
    WholeBlock,
    by_second_half,
    least_recomputed,
)
from legoai.cost.search.stages.action_graph import graph_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.graph import is_traced
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
        whole: the same of a block that is recomputed as a whole; None where that is not known.
        room: of active memory on a rank.
    """

    state: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    gathered: float = 0.0
    given: float = 0.0
    kept: float = 0.0
    outputs: Sequence[Output] = ()
    whole: WholeBlock | None = None
    room: float = math.inf

    def between(self, blocks: int, held: int, *, summed: bool, halves: bool) -> float:
        """Those of a rank with some blocks that holds micro batches between their forward and their backward.

        Args:
            blocks: of the rank.
            held: blocks that hold a micro batch, one counted for each of these.
            summed: whether all blocks have gradients.
            halves: whether a backward is in halves: then parameters stay gathered from forward to backward.
        """
        return self._of_blocks(blocks, summed=summed, halves=halves) + held * max(self.given, self.kept)

    def _of_blocks(self, blocks: int, *, summed: bool, halves: bool) -> float:
        parameters = max(self.parameters, self.gathered) if halves else self.parameters
        of_block = self.state + parameters + (self.gradients if summed else 0.0)
        return blocks * of_block + (0.0 if parameters else self.gathered)

    def recomputed(self, each: int, held: Sequence[int], *, first: bool, summed: bool, halves: bool) -> float:
        """Least seconds that such a rank recomputes of each micro batch, whatever the treatments are.

        Args:
            each: blocks of each stage.
            held: micro batches between their forward and their backward in each stage of the rank.
            first: whether the first of these is the model's.
            summed: whether all blocks have gradients.
            halves: as above.
        """
        left = self.room - self._of_blocks(each * len(held), summed=summed, halves=halves)
        outputs = [
            Output(each * one.seconds, number * each * one.bytes)
            for place, number in enumerate(held)
            for one in self.read(first=first and not place, halves=halves)
        ]
        return least_recomputed(outputs, left - each * sum(held) * self.given)

    def read(self, *, first: bool, halves: bool) -> Sequence[Output]:
        """What may be recomputed of a block, in the model's first stage or in another."""
        if not halves or self.whole is None:
            return self.outputs
        return [self.whole.in_first if first else self.whole.in_others]


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
    computes, again = _to_starts(analysis, least, recomputed)
    for count, v_shaped, halves, in_turn in {_shape(str(one), ranks, pipeline.stages) for one in listed}:
        if count > len(known.blocks):
            continue  # a stage has a block at least
        counts = known.even_counts(count, **weights)
        edges = [0, *(known.position[point] for point in known.counted(counts)), len(known.starts)]
        forward, backward = ([to[edge] for edge in edges] for to in computes)
        extra = [again[edge] for edge in edges]
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
        busiest = max(busiest, whole + idle + besides(idle))
        takes = 0.0
        if of_pass >= ranks and count in (ranks, 2 * ranks):
            each = min(counts)  # blocks of a stage
            summed = count == ranks or (not in_turn and (of_pass > ranks if v_shaped else of_pass >= 2 * ranks))
            at_once = [min(ranks, of_pass - 1) if count == ranks else of_pass if in_turn else ranks] * (count // ranks)
            apart = halves and not is_traced(analysis)
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


def recomputed_by_ranks(analysis: Analysis, block: BlockBytes) -> tuple[float, ...]:
    """Least seconds that each rank recomputes of one micro batch, since memory cannot keep all; none if not known.

    At each moment of its schedule what a rank keeps for the micro batches that are under way has no more room than is
    left beside the state of its blocks, the gradients that are added up, and the parameters that stay gathered.

    Args:
        analysis: of a plan with an even split.
        block: bytes of a block, which are those of all.

    Raises:
        Undecided: the schedule is open.
    """
    pipeline, count = analysis.plan.pipeline, stage_count(analysis)
    graph = graph_of(analysis) if pipeline is not None and pipeline.split == "even" else None
    if graph is None or count is None or graph.stages != count or not block.outputs:
        return ()
    each = len(split_points(analysis).blocks) // count
    halves = splits_backward(analysis) and not is_traced(analysis)
    parameters = max(block.parameters, block.gathered) if halves else block.parameters
    recomputed = []
    for stages, moments in zip(stages_of_ranks(analysis), graph.held, strict=True):
        most = 0.0
        for moment in moments:
            outputs = [
                Output(each * one.seconds, number * each * one.bytes)
                for stage, number in moment.micro_batches.items()
                for one in block.read(first=stage == 0, halves=halves)
            ]
            blocks = len(stages) * block.state + len(moment.summed) * block.gradients
            blocks += len(moment.gathered) * parameters + sum(moment.micro_batches.values()) * block.given
            most = max(most, least_recomputed(outputs, block.room - each * blocks))
        recomputed.append(most)
    return tuple(recomputed)


@fact
def _share_of_blocks(analysis: Analysis) -> float:
    """Share of the model's parameters that lie in blocks."""
    assert analysis.manifest is not None
    blocks = tuple(f"{path}." for path in split_points(analysis).blocks)
    sizes = [(name.startswith(blocks), math.prod(shape)) for name, shape in analysis.manifest.parameters()]
    return sum(size for inside, size in sizes if inside) / sum(size for _, size in sizes)


def block_bytes(
    analysis: Analysis,
    *,
    state: float,
    outputs: Sequence[Output],
    whole: WholeBlock | None,
    given: float,
    kept: float,
    room: float,
) -> BlockBytes:
    """Bytes of the blocks of a pipeline on one rank, where all of them are alike; else none are told.

    Args:
        analysis: of a plan whose mesh and batch are decided.
        state: of the parameters and optimizer state of a mean rank, in shards.
        outputs: that the backward of a block reads.
        whole: the same of a block that is recomputed as a whole.
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
        whole=whole,
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
