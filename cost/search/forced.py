"""Recomputation that memory forces, whatever the treatments are: what finds no room is computed again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from legoai.cost.kernels.work import Movement, MovementKind
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.search.least_costs import movements
from legoai.cost.search.least_costs.activations import inputs_of_blocks, kept_of_blocks, worked_on
from legoai.cost.search.least_costs.collectives import gathered_bytes
from legoai.cost.search.least_costs.model_layers import ModelLayers
from legoai.cost.search.least_costs.recomputation import (
    Output,
    WholeBlock,
    least_recomputed,
    outputs_of_blocks,
    whole_block,
)
from legoai.cost.search.least_costs.treatments import open_treatments, sides_of_hull
from legoai.cost.search.least_costs.units_in_backward import units_in_backward
from legoai.cost.search.stages.block_bytes import BlockBytes, block_bytes, recomputed_by_ranks
from legoai.cost.search.stages.costs import Room
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.bounds import logits_bytes
from legoai.dsl.analysis.state import state_bytes
from legoai.specs.directives.hole import Undecided

_KINDS: Final[tuple[MovementKind, ...]] = ("elementwise", "normalisation", "reduction")
"""What kernels between layers may be."""


@dataclass(slots=True)
class Forced:
    """Least recomputation of the candidates of one plan.

    Args:
        layers: least seconds of layers.
        room: bytes that a rank may take.
    """

    layers: ModelLayers
    room: Callable[[Analysis], Room]

    def of_micro_batch(self, analysis: Analysis) -> float:
        """Least seconds that any treatments recompute of one micro batch on all ranks, since memory cannot keep all."""
        if analysis.plan.mesh.pp > 1:
            return sum(self.layers.once(analysis, self.of_ranks))
        try:
            state = state_bytes(analysis)
            outputs, each = self.layers.once(analysis, self._outputs)
            inputs = inputs_of_blocks(analysis)
            if state is None or not outputs or not inputs:
                return 0.0
            room = min(self.room(analysis)) - (state.parameters + state.optimizer + gathered_bytes(analysis) + inputs)
            logits, works, units = logits_bytes(analysis) or 0, worked_on(analysis), units_in_backward(analysis)
        except Undecided:
            return 0.0
        # In the backward of a block's feed-forward module all that it works on is there, beside what the others keep.
        before, within = _repeated(outputs, each), [*_repeated(outputs[:1], each - 1), *_repeated(outputs[1:], each)]
        most = [least_recomputed(before, room - logits - units.before)]
        most.append(least_recomputed(within, room - works - units.last))
        if len(outputs) == 1 and each > 1:  # blocks are alike, of which the last is over
            most.append(least_recomputed(_repeated(outputs, each - 2), room + inputs / each - works - units.second))
        return max(most)

    def of_ranks(self, analysis: Analysis) -> tuple[float, ...]:
        """The same of each rank of a pipeline; none where it is not known."""
        try:
            return recomputed_by_ranks(analysis, self.layers.once(analysis, self.of_block))
        except Undecided:
            return ()

    def of_block(self, analysis: Analysis) -> BlockBytes:
        """What blocks take that are all alike."""
        state, blocks = state_bytes(analysis), movements.blocks_alike(analysis.manifest)
        outputs, _ = self.layers.once(analysis, self._outputs)
        inputs = inputs_of_blocks(analysis)
        if state is None or not blocks or not inputs or not outputs:
            return BlockBytes()
        return block_bytes(
            analysis,
            state=state.parameters + state.optimizer,
            outputs=outputs[0],
            whole=self.layers.once(analysis, self._whole, blocks[0]),
            given=inputs / len(blocks),
            kept=self._kept(analysis, blocks),
            room=min(self.room(analysis)),
        )

    def _outputs(self, analysis: Analysis) -> tuple[Sequence[Sequence[Output]], int]:
        """The outputs inside of blocks that backward reads, and of how many each; of one where all blocks are alike."""
        assert analysis.manifest is not None
        alike = movements.blocks_alike(analysis.manifest)
        each = [path for item in analysis.manifest.block_lists for path in item.paths]
        profile, rate = self.layers.machine(analysis).profile, analysis.plan.precision.param

        def moves(size: float) -> float:
            works = (Movement(kind=kind, bytes=int(size), rate=rate) for kind in _KINDS)
            return min(seconds_of(work, profile)[0] for work in works)

        found = outputs_of_blocks(
            analysis,
            alike[-1:] or each,
            self.layers.once(analysis, self.layers.of_layers),
            self.layers.once(analysis, self.layers.waits),
            functools.cache(moves),
        )
        sides = self._sides(analysis, alike[-1], found[0]) if alike and found else ()
        return [sides] if sides else found, len(alike) or 1

    def _sides(self, analysis: Analysis, block: str, outputs: Sequence[Output]) -> Sequence[Output]:
        """What a block may keep as its open treatment allows it; nothing where that is not open, or not known."""
        if not open_treatments(analysis):
            return ()
        moved = self.layers.once(analysis, self.layers.moved)
        least = self.layers.once(analysis, self.layers.of_layers)
        again = 0.0 if moved is None else moved.again
        seen = functools.partial(self.layers.seen.under, analysis)
        return sides_of_hull(analysis, block, least, again, seen, outputs)

    def _kept(self, analysis: Analysis, blocks: Sequence[str]) -> float:
        """Least bytes that a block keeps for one micro batch."""
        least: dict[str, float] = dict(kept_of_blocks(analysis))
        with contextlib.suppress(Undecided):
            for path, size in self.layers.seen.kept(analysis).items():
                least[path] = max(least.get(path, 0.0), size)
        return min(least.get(path, 0.0) for path in blocks)

    def _whole(self, analysis: Analysis, block: str) -> WholeBlock | None:
        """A block, if it is recomputed as a whole."""
        return whole_block(analysis, block, self.layers.once(analysis, self.layers.of_layers))


def _repeated(outputs: Sequence[Sequence[Output]], times: int) -> list[Output]:
    """Those of some blocks, each of which stands for several."""
    return [Output(times * one.seconds, times * one.bytes) for block in outputs for one in block]
