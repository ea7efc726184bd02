"""Lower bound of what communication beside a block adds to it, from simulated steps in a steady state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from legoai.cost.search.candidate_bounds.data_parallel import DataParallelBounds
from legoai.cost.search.lower_bounds.communication import collectives
from legoai.cost.search.lower_bounds.local_kernels import Pass
from legoai.cost.search.lower_bounds.memory_bound_kernels import repeated_blocks
from legoai.cost.search.lower_bounds.model_layers import ModelLayers
from legoai.cost.search.lower_bounds.observed.steady_blocks import SteadyTime
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import is_within
from legoai.specs.directives.checkpoint import KeepAll

_ENDS: Final = 3
"""Blocks that may be delayed less than steady ones: the first, the last, and one where treatments meet."""

_MOST_SLOWDOWN: Final = 2.0
"""Slowdown beside collectives up to which what recomputes longer takes longer, whatever that spares its backward."""


@dataclass(slots=True)
class BlockDelays:
    """Least delays of blocks in the candidates of one plan.

    Args:
        layers: least seconds of layers.
        data_parallel: least seconds beside layers, which already count.
    """

    layers: ModelLayers
    data_parallel: DataParallelBounds

    def of(self, analysis: Analysis, treatment: object, recomputes: float) -> float:
        """Least seconds by which a block is delayed in a micro batch, beside what delays all.

        Where its treatment was not observed, its forward is delayed as under any other treatment, and its backward as
        that of a block that keeps all, but for what may run beside its recomputation instead.

        Args:
            analysis: of a candidate.
            treatment: of the block.
            recomputes: least seconds for which the block recomputes.
        """
        steady, own = self.layers.steady, self._computes_of_block
        seen = steady.of(analysis, treatment)
        if seen is not None:
            block = self.layers.once(analysis, own)
            return self._beyond(analysis, seen, block.forward + block.backward + recomputes)
        in_forward, kept = steady.in_forward(analysis), steady.of(analysis, KeepAll())
        if in_forward is None:
            return 0.0
        block = self.layers.once(analysis, own)
        found = self._beyond(analysis, in_forward, block.forward)
        if kept is None:
            return found
        slowdown = collectives.most_slowdown(analysis, self.layers.machine(analysis))
        if slowdown > _MOST_SLOWDOWN:
            return found
        spared = recomputes * (slowdown - 1.0)
        return max(found, self._beyond(analysis, kept, block.forward + block.backward) - spared)

    def _beyond(self, analysis: Analysis, steady: SteadyTime, computes: float) -> float:
        """Seconds that a steady block adds beyond those that it computes, and beyond what is known to delay it."""
        blocks = len(repeated_blocks(analysis.manifest))
        besides = self.data_parallel.of(analysis)
        known = steady.beside.delays(besides.slowed)
        return max(0.0, steady.seconds - computes - known) * max(0, blocks - _ENDS) / blocks

    def _computes_of_block(self, analysis: Analysis) -> Pass:
        """Least seconds of a micro batch in one block; all blocks must be equal."""
        least, last = self.layers.once(analysis, self.layers.together), repeated_blocks(analysis.manifest)[-1]
        own = [one for path, one in least.items() if is_within(path, last)]
        return Pass(sum(one.forward for one in own), sum(one.backward for one in own))
