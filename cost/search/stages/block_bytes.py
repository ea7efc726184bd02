"""Lower bounds of the memory of a pipeline rank's blocks, and of the recomputation of activations that do not fit."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from legoai.cost.search.lower_bounds.activations import between_halves
from legoai.cost.search.lower_bounds.communication.unit_elements import elements_of_units
from legoai.cost.search.lower_bounds.recomputation import Output, WholeBlock, least_recomputed
from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.buffers import sent_and_received
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.magnitudes.state import summed_gradients_of_modules, unsharded_parameters_of_modules
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.stages.pipeline import split_points, splits_backward, stage_count, stages_of_ranks
from legoai.specs.directives.hole import Undecided
from legoai.specs.dtypes import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Least bytes of one of equal blocks on a pipeline rank, and the outputs of it that may be recomputed.

    Attributes:
        state: bytes of the block's shards of parameters and optimizer state.
        gradients: bytes of the block's accumulated gradients.
        parameters: bytes of the block's parameters that stay unsharded.
        gathered: bytes of unsharded parameters of the block that computes, where none stay unsharded.
        given: bytes of the block's input for one micro batch, which is always kept.
        kept: bytes of activations of one micro batch under the plan's treatments, the input included.
        halved: further bytes of one micro batch between the halves of its backward.
        outputs: outputs that the backward of the block reads.
        whole: the same for a block that is recomputed as a whole; None where unknown.
        room: limit of a rank's active memory, in bytes.
    """

    state: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    gathered: float = 0.0
    given: float = 0.0
    kept: float = 0.0
    halved: float = 0.0
    outputs: Sequence[Output] = ()
    whole: WholeBlock | None = None
    room: float = math.inf

    def between(self, blocks: int, held: int, *, summed: bool, halves: bool) -> float:
        """Bytes of a rank with micro batches in flight.

        Args:
            blocks: number of blocks of the rank.
            held: sum over its blocks of their micro batches in flight.
            summed: whether all blocks have accumulated gradients.
            halves: whether backward is split; if so, parameters stay unsharded from forward to backward.
        """
        return self._of_blocks(blocks, summed=summed, halves=halves) + held * max(self.given, self.kept)

    def _of_blocks(self, blocks: int, *, summed: bool, halves: bool) -> float:
        parameters = max(self.parameters, self.gathered) if halves else self.parameters
        of_block = self.state + parameters + (self.gradients if summed else 0.0)
        return blocks * of_block + (0.0 if parameters else self.gathered)

    def recomputed(
        self, counts: Sequence[int], held: Sequence[int], *, first: bool, summed: bool, halves: bool
    ) -> float:
        """Least seconds of recomputation of such a rank per micro batch, over all treatments.

        Args:
            counts: number of blocks of each stage of the rank.
            held: micro batches in flight of each stage of the rank.
            first: whether the first of these stages is the model's first stage.
            summed: whether all blocks have accumulated gradients.
            halves: as for :meth:`between`.
        """
        left = self.room - self._of_blocks(sum(counts), summed=summed, halves=halves)
        outputs = [
            Output(blocks * one.seconds, number * blocks * one.bytes)
            for place, (blocks, number) in enumerate(zip(counts, held, strict=True))
            for one in self.read(first=first and not place, halves=halves)
        ]
        return least_recomputed(outputs, left - self.given * sum(map(operator.mul, counts, held)))

    def read(self, *, first: bool, halves: bool) -> Sequence[Output]:
        """Outputs of a block that may be recomputed, in the model's first stage or in another."""
        if not halves or self.whole is None:
            return self.outputs
        return [self.whole.in_first if first else self.whole.in_others]


def recomputed_by_ranks(analysis: Analysis, block: BlockBytes) -> tuple[float, ...]:
    """Least seconds of recomputation of each rank per micro batch, forced by the memory limit; empty if not known.

    At each moment of the schedule, the activations of the micro batches in flight must fit in the memory limit less the
    state of the blocks, accumulated gradients, tensors between the halves of a split backward, parameters that stay
    unsharded, and what is sent and received.

    Args:
        analysis: analysis of a plan with an even split.
        block: bytes of each block.

    Raises:
        Undecided: the schedule is open.
    """
    pipeline, count = analysis.plan.pipeline, stage_count(analysis)
    graph = graph_of(analysis) if pipeline is not None and pipeline.split == "even" else None
    if graph is None or count is None or graph.stages != count or not block.outputs:
        return ()
    counts = split_points(analysis).even_counts(count)
    halves = splits_backward(analysis) and not is_traced(analysis)
    parameters = max(block.parameters, block.gathered) if halves else block.parameters
    recomputed = []
    for stages, moments in zip(stages_of_ranks(analysis), graph.held, strict=True):
        most = 0.0
        for moment in moments:
            kept = moment.kept(between_halves=halves)
            outputs = [
                Output(counts[stage] * one.seconds, number * counts[stage] * one.bytes)
                for stage, number in kept.items()
                for one in block.read(first=stage == 0, halves=halves)
            ]
            taken = block.state * sum(counts[stage] for stage in stages)
            taken += block.gradients * sum(counts[stage] for stage in moment.summed)
            taken += parameters * sum(counts[stage] for stage in moment.gathered)
            taken += block.given * sum(number * counts[stage] for stage, number in kept.items())
            taken += sent_and_received(analysis, stages, moment, between_halves=halves)
            if halves:
                taken += block.halved * sum(count * counts[stage] for stage, count in moment.with_gradients.items())
            most = max(most, least_recomputed(outputs, block.room - taken))
        recomputed.append(most)
    return tuple(recomputed)


@fact
def _share_of_blocks(analysis: Analysis) -> float:
    """Share of the blocks in the model's parameters, or in those that are trained, whichever is less."""
    assert analysis.manifest is not None
    blocks = tuple(f"{path}." for path in split_points(analysis).blocks)
    sizes = {name: math.prod(shape) for name, shape in analysis.manifest.parameters()}
    untrained = untrained_parameters(analysis)
    trained = {name: size for name, size in sizes.items() if name not in untrained}
    return min(
        sum(size for name, size in some.items() if name.startswith(blocks)) / sum(some.values())
        for some in (sizes, trained)
        if some
    )


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
    """Least bytes of a block of a pipeline on one rank.

    Args:
        analysis: analysis of a plan whose mesh and batch are decided.
        state: bytes of a mean rank's shards of parameters and optimizer state.
        outputs: outputs that the backward of a block reads.
        whole: the same for a block that is recomputed as a whole.
        given: bytes of a block's input for one micro batch.
        kept: bytes of a block's activations of one micro batch, as far as that is decided.
        room: limit of a rank's active memory, in bytes.

    Raises:
        Undecided: the bytes depend on another hole.
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
        halved=_halved_of_block(analysis),
        outputs=outputs,
        whole=whole,
        room=room,
    )


@fact
def _gradients_of_block(analysis: Analysis) -> float:
    return _of_least_block(analysis, summed_gradients_of_modules(analysis))


@fact
def _halved_of_block(analysis: Analysis) -> float:
    return _of_least_block(analysis, between_halves(analysis))


@fact
def _parameters_of_block(analysis: Analysis) -> float:
    return _of_least_block(analysis, unsharded_parameters_of_modules(analysis))


def _of_least_block(analysis: Analysis, of_modules: Mapping[str, int]) -> float:
    """Least bytes of a block, from the bytes of modules."""
    of_blocks = dict.fromkeys(split_points(analysis).blocks, 0.0)
    for path, size in of_modules.items():
        block = split_points(analysis).holder(path)
        if block in of_blocks:
            of_blocks[block] += size
    return min(of_blocks.values(), default=0.0)
