"""Lower bound of what FSDP adds to a step beside its layers: copies, exposed communication, slowdown of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from legoai.cost.search.lower_bounds.communication import collectives
from legoai.cost.search.lower_bounds.communication.exposed import exposed
from legoai.cost.search.lower_bounds.gradient_accumulation import adding_up
from legoai.cost.search.lower_bounds.model_layers import ModelLayers
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.specs.directives.hole import Undecided


class DataParallelBound(NamedTuple):
    """Least seconds of a step in which a mean rank's layers wait for parameters and gradients of units.

    Attributes:
        copies: in which these are copied.
        communicates: in which they are gathered and reduced.
        hidden: of these, in which the rank waits for other collectives.
        slowed: how much longer layers take beside these, as a share of that time.
        exposed: of these, in which nothing computes.
    """

    copies: float
    communicates: float = 0.0
    hidden: float = 0.0
    slowed: float = 0.0
    exposed: float = 0.0

    def seconds(self, idle: float = 0.0) -> float:
        """Those by which all this delays the layers.

        Collectives slow what computes beside them, but for what is hidden where nothing does: behind waits for
        collectives of layers, and in seconds for which the rank is idle at least. In longer ones no more would be
        hidden than they take.
        """
        beside = max(0.0, self.communicates - self.exposed - (self.hidden + idle))
        return self.copies + self.exposed + beside * self.slowed


@dataclass(slots=True)
class DataParallelBounds:
    """Least seconds beside layers of the candidates of one plan.

    Args:
        layers: least seconds of layers.
        room: bytes of active memory that a rank may take.
    """

    layers: ModelLayers
    room: Callable[[Analysis], float]

    def of(self, analysis: Analysis) -> DataParallelBound:
        """What gathering parameters and reducing gradients takes beside a mean rank's layers, at least."""
        plan, batches = analysis.plan, micro_batches(analysis.plan)
        copies = self.layers.once(analysis, self._copies)
        communicates = self.layers.once(analysis, self.communicates)
        if batches is None or not communicates:
            return DataParallelBound(copies)
        hidden = self.layers.once(analysis, self._waits) * batches / plan.mesh.pp
        slowed, waited = self.layers.once(analysis, self._slowed), self.layers.once(analysis, self._exposed)
        return DataParallelBound(copies, communicates, hidden, slowed, waited)

    def communicates(self, analysis: Analysis) -> float:
        """Least seconds of a step in which the parameters of units are gathered and their gradients reduced."""
        try:
            return collectives.of_parameters(analysis, self.layers.machine(analysis), self.room(analysis))
        except Undecided:
            return 0.0

    def adding_up(self, analysis: Analysis, summed: float, halves: bool) -> float:
        """Least seconds of a step in which a rank adds up so many bytes of gradients over micro batches."""
        try:
            return adding_up(analysis, self.layers.machine(analysis), summed, halves=halves)
        except Undecided:
            return 0.0

    def _copies(self, analysis: Analysis) -> float:
        """Least seconds of a step in which parameters and gradients are copied for these."""
        try:
            return collectives.copies_of_parameters(analysis, self.layers.machine(analysis), self.room(analysis))
        except Undecided:
            return 0.0

    def _exposed(self, analysis: Analysis) -> float:
        """Least seconds of a step in which nothing computes while units are gathered or reduced."""
        try:
            return exposed(analysis, self.layers.machine(analysis), self.room(analysis))
        except Undecided:
            return 0.0

    def _waits(self, analysis: Analysis) -> float:
        """Least seconds for which all layers wait for collectives in the forward, twice, and backward of a micro batch.

        What is recomputed waits once more. What open styles add counts as if it were waits, as it may be.
        """
        waits = [*self.layers.once(analysis, self.layers.waits).values()]
        waits += [one.together for one in self.layers.once(analysis, self.layers.of_styles).values()]
        return sum(2 * one.forward + one.backward for one in waits)

    def _slowed(self, analysis: Analysis) -> float:
        return collectives.slowed(analysis, self.layers.machine(analysis))
