"""Lower bound of recomputation: activations that do not fit in memory are recomputed, whatever the treatments are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from legoai.cost.kernels.kinds import Movement, MovementKind
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.search.lower_bounds import memory_bound_kernels
from legoai.cost.search.lower_bounds.activations import inputs_of_blocks, kept_of_blocks, worked_on
from legoai.cost.search.lower_bounds.communication.collectives import gathered_bytes
from legoai.cost.search.lower_bounds.communication.units_in_backward import units_in_backward
from legoai.cost.search.lower_bounds.model_layers import ModelLayers
from legoai.cost.search.lower_bounds.open_holes.treatments import Hull, hull_of_treatments, open_treatments
from legoai.cost.search.lower_bounds.recomputation import (
    Output,
    WholeBlock,
    least_recomputed,
    outputs_of_blocks,
    whole_block,
)
from legoai.cost.search.stages.block_bytes import BlockBytes, block_bytes, recomputed_by_ranks
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.bounds import loss_bytes
from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.specs.directives.hole import Undecided

_KINDS: Final[tuple[MovementKind, ...]] = ("elementwise", "normalisation", "reduction")
"""What kernels between layers may be."""


class _RoomOfBlocks(NamedTuple):
    """Bytes for what blocks keep beside their inputs: before the first backward, in the last block's, and behind it."""

    before: float
    last: float
    second: float


@dataclass(slots=True)
class RecomputationBounds:
    """Least recomputation of the candidates of one plan.

    Args:
        layers: least seconds of layers.
        room: bytes of active memory that a rank may take.
        delay: seconds by which a block under a treatment, which recomputes for so many, is delayed in a micro batch.
    """

    layers: ModelLayers
    room: Callable[[Analysis], float]
    delay: Callable[[Analysis, Any, float], float]

    def of_micro_batch(self, analysis: Analysis) -> float:
        """Least seconds that any treatments recompute of one micro batch on all ranks, since memory cannot keep all."""
        if analysis.plan.mesh.pp > 1:
            return sum(self.layers.once(analysis, self.of_ranks))
        try:
            hull = self.layers.once(analysis, self._hull)
            outputs, each = self.layers.once(analysis, self._outputs)
            room = self.layers.once(analysis, self._room)
        except Undecided:
            return 0.0
        if hull.sides:
            outputs = [hull.sides]
        if room is None or not outputs:
            return 0.0
        # In the backward of a block's feed-forward module all that it works on is there, beside what the others keep.
        before, within = _repeated(outputs, each), [*_repeated(outputs[:1], each - 1), *_repeated(outputs[1:], each)]
        most = [least_recomputed(before, room.before), least_recomputed(within, room.last)]
        if len(outputs) == 1 and each > 1:  # the last of equal blocks is over
            most.append(least_recomputed(_repeated(outputs, each - 2), room.second))
        return max(most) + (each * hull.least if hull.sides else 0.0)

    def treatments(self, analysis: Analysis) -> Sequence[Any]:
        """Of what blocks may come to be under, the treatments that decide how much is recomputed at least."""
        try:
            hull, room = self.layers.once(analysis, self._hull), self.layers.once(analysis, self._room)
            _, each = self.layers.once(analysis, self._outputs)
        except Undecided:
            return ()
        return () if room is None or not hull.sides else hull.around(min(room) / each)

    def _room(self, analysis: Analysis) -> _RoomOfBlocks | None:
        """Bytes for what blocks keep beside their inputs, at moments of a step; None where it is not known."""
        state, inputs, units = state_bytes(analysis), inputs_of_blocks(analysis), units_in_backward(analysis)
        if state is None or not inputs:
            return None
        room = self.room(analysis) - (state.parameters + state.optimizer + gathered_bytes(analysis) + inputs)
        blocks, works = len(memory_bound_kernels.repeated_blocks(analysis.manifest)) or 1, worked_on(analysis)
        return _RoomOfBlocks(
            before=room - loss_bytes(analysis) - units.before,
            last=room - works - units.last,
            second=room + inputs / blocks - works - units.second,
        )

    def of_ranks(self, analysis: Analysis) -> tuple[float, ...]:
        """The same of each rank of a pipeline; none where it is not known."""
        try:
            return recomputed_by_ranks(analysis, self.layers.once(analysis, self.of_block))
        except Undecided:
            return ()

    def of_block(self, analysis: Analysis) -> BlockBytes:
        """Bytes of equal blocks."""
        state, blocks = state_bytes(analysis), memory_bound_kernels.repeated_blocks(analysis.manifest)
        outputs, _ = self.layers.once(analysis, self._outputs)
        hull = self.layers.once(analysis, self._hull)
        inputs = inputs_of_blocks(analysis)
        if state is None or not blocks or not inputs or not outputs:
            return BlockBytes()
        return block_bytes(
            analysis,
            state=state.parameters + state.optimizer,
            outputs=hull.sides or outputs[0],
            whole=self.layers.once(analysis, self._whole, blocks[0]),
            given=inputs / len(blocks),
            kept=self._kept(analysis, blocks),
            room=self.room(analysis),
        )

    def _outputs(self, analysis: Analysis) -> tuple[Sequence[Sequence[Output]], int]:
        """The outputs inside of blocks that backward reads, and of how many each; of one where all are equal."""
        assert analysis.manifest is not None
        blocks = memory_bound_kernels.repeated_blocks(analysis.manifest)
        each = [path for item in analysis.manifest.block_lists for path in item.paths]
        profile, rate = self.layers.machine(analysis).profile, analysis.plan.precision.param

        def moves(size: float) -> float:
            works = (Movement(kind=kind, bytes=int(size), rate=rate) for kind in _KINDS)
            return min(seconds_of(work, profile)[0] for work in works)

        found = outputs_of_blocks(
            analysis,
            blocks[-1:] or each,
            self.layers.once(analysis, self.layers.of_layers),
            self.layers.once(analysis, self.layers.waits),
            functools.cache(moves),
        )
        return found, len(blocks) or 1

    def _hull(self, analysis: Analysis) -> Hull:
        """What a block may keep as its open treatment allows it; nothing where that is not open, or not known."""
        blocks = memory_bound_kernels.repeated_blocks(analysis.manifest)
        outputs, _ = self.layers.once(analysis, self._outputs)
        if not blocks or not outputs or not open_treatments(analysis):
            return Hull()
        moved = self.layers.once(analysis, self.layers.moved)
        least = self.layers.once(analysis, self.layers.of_layers)
        again = 0.0 if moved is None else moved.again
        seen = functools.partial(self.layers.observed.under, analysis)
        delay = functools.partial(self.delay, analysis)
        return hull_of_treatments(analysis, blocks[-1], least, again, seen, delay, outputs[0])

    def _kept(self, analysis: Analysis, blocks: Sequence[str]) -> float:
        """Least bytes that a block keeps for one micro batch."""
        least: dict[str, float] = dict(kept_of_blocks(analysis))
        with contextlib.suppress(Undecided):
            for path, size in self.layers.observed.kept(analysis).items():
                least[path] = max(least.get(path, 0.0), size)
        return min(least.get(path, 0.0) for path in blocks)

    def _whole(self, analysis: Analysis, block: str) -> WholeBlock | None:
        """A block, if it is recomputed as a whole."""
        return whole_block(analysis, block, self.layers.once(analysis, self.layers.of_layers))


def _repeated(outputs: Sequence[Sequence[Output]], times: int) -> list[Output]:
    """Those of some blocks, each of which stands for several."""
    return [Output(times * one.seconds, times * one.bytes) for block in outputs for one in block]
