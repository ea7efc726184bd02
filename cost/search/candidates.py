"""Evaluated candidate: an answer for each hole of a plan, and its figures."""

from __future__ import annotations

from dataclasses import dataclass

from legoai.cost.estimate import within
from legoai.cost.search.evaluator import Figures
from legoai.dsl.open_plan import Candidate
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
