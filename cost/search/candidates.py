"""Candidates of a search: the order in which holes are decided, and evaluated candidates with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from legoai.cost.requirements import within
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.dsl.holes import OpenHole
from legoai.dsl.open_plan import Candidate
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.fsdp import Unit
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.pipeline import Pipeline
from legoai.specs.directives.precision import Precision
from legoai.specs.directives.require import Requirement

Choices = tuple[int | None, ...]
"""For each hole the index of its choice; None while it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A candidate with its figures.

    Attributes:
        choices: for each hole.
        figures: of the candidate.
        violated: the requirements that they violate.
    """

    choices: Choices
    figures: Figures
    violated: tuple[Requirement, ...]

    @property
    def feasible(self) -> bool:
        """Whether it fits its devices and meets every requirement."""
        return self.figures.fits is not False and not self.violated


def evaluated(choices: Choices, candidate: Candidate, figures: Figures) -> Evaluated:
    """A candidate with its figures, and with the requirements that they violate."""
    violated = tuple(
        item for item in candidate.plan.require if not within(figures.metric(item.metric, item.dimension), item)
    )
    return Evaluated(choices=choices, figures=figures, violated=violated)


def order_of(holes: Sequence[OpenHole]) -> list[int]:
    """Indices of holes in the order in which they are answered: what decides most about others comes first.

    Treatments of memory come before what changes a step by little, such as the form of the loss. Styles are chosen, and
    then blocks assigned to stages, when all else is decided.
    """
    # Without devices and dtypes no time is bounded.
    first: dict[type, int] = {ClusterUse: 1, Precision: 1, Mesh: 2, Batch: 3, Pipeline: 4, Unit: 5, Checkpoint: 5}

    def rank(index: int) -> tuple[int, int]:
        hole = holes[index]
        if hole.line is not None:
            return 7, index  # a program decides those together
        # Without an owner a statement cannot be read before the hole is answered, so that nothing could be pruned.
        place = 0 if hole.owner is None else first.get(hole.owner, 6)
        return 8 if hole.assigns else place, index

    return sorted(range(len(holes)), key=rank)
