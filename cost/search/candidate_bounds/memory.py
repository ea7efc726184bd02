"""Lower bound of the active memory of a candidate on its fullest rank."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from legoai.cost.search.candidate_bounds.observed_peaks import ObservedPeaks
from legoai.cost.search.lower_bounds.activations import freed_with_last, held_in_backward, kept_by_blocks
from legoai.cost.search.lower_bounds.communication.collectives import gathered_bytes
from legoai.cost.search.lower_bounds.communication.units_in_backward import units_in_backward
from legoai.cost.search.lower_bounds.model_layers import ModelLayers
from legoai.cost.search.lower_bounds.shared_work import SharedWork
from legoai.cost.search.stages.bounds import held_between_backwards
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.magnitudes.bounds import loss_bytes
from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.specs.directives.hole import Undecided


@dataclass(slots=True)
class MemoryBounds:
    """Least memory of the candidates of one plan, but for what a pipeline's schedule decides.

    Args:
        layers: with the observed blocks.
        shared: what is known from candidates that were simulated.

    Attributes:
        peaks: of steps whose blocks all have one treatment.
    """

    layers: ModelLayers
    shared: SharedWork
    peaks: ObservedPeaks = field(default_factory=ObservedPeaks)

    def of(self, analysis: Analysis) -> float:
        """Least bytes of active memory on the fullest rank."""
        least: float = least_memory(analysis, self.shared.activations(analysis), self.kept(analysis))
        with contextlib.suppress(Undecided):
            least = max(least, self.peaks.of(analysis))
        return least

    def kept(self, analysis: Analysis) -> float:
        """Bytes that all blocks were observed to keep for one micro batch; 0 where their treatments are open."""
        try:
            return sum(self.layers.once(analysis, self.layers.observed.kept).values())
        except Undecided:
            return 0.0


def least_memory(analysis: Analysis, activations: int, kept: float = 0.0) -> float:
    """Least bytes of active memory on the fullest rank, but for what a pipeline's schedule decides; 0 if not known.

    Args:
        analysis: of a plan, which may have holes.
        activations: bytes of activations that live at the peak, as far as that is known from another candidate.
        kept: bytes that all blocks keep for one micro batch, likewise.
    """
    try:
        state = state_bytes(analysis)
    except Undecided:
        return 0.0
    if state is None:
        return 0.0
    always, live = state.parameters + state.optimizer, 0.0
    with contextlib.suppress(Undecided):
        live = always + gathered_bytes(analysis) + max(activations, _activations(analysis, kept))
    with contextlib.suppress(Undecided):
        live = max(live, always + _between_backwards(analysis))
    return max(state.total, live)


def without_activations(analysis: Analysis) -> int:
    """Bytes of parameters, gradients, optimizer state and what is gathered of parameters; 0 if not known."""
    try:
        state = state_bytes(analysis)
        return 0 if state is None else state.total + gathered_bytes(analysis)
    except Undecided:
        return 0


@fact
def _between_backwards(analysis: Analysis) -> int:
    """Least bytes beside parameters and optimizer state, in shards, when the second backward of a stage goes on."""
    try:
        kept = held_in_backward(analysis)
    except Undecided:
        kept = 0
    return held_between_backwards(analysis, kept)


def _activations(analysis: Analysis, kept: float) -> float:
    """Least bytes of what one micro batch leaves for its backward, on the fullest rank, and of units beside it."""
    kept = max(kept / analysis.plan.mesh.pp, kept_by_blocks(analysis))
    if analysis.plan.mesh.pp > 1:
        return max(kept, held_in_backward(analysis))
    units, held = units_in_backward(analysis), held_in_backward(analysis)
    begins = units.before + loss_bytes(analysis) + kept
    return max(begins, units.last + held, units.second + held - freed_with_last(analysis)) if held else begins
