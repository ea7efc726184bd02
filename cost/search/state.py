"""State that the parts of one search share: what is searched, by what, how long, and what was found."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import OutOfTimeError
from legoai.cost.search.objective import Costs
from legoai.cost.search.result import SearchResult
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.specs.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """State of one search.

    Args:
        plan: with its holes.
        costs: of its candidates.
        without: spans of `require` lines that are left out.
        deadline: a time of `time.monotonic` at which to stop.
        found: so far.
    """

    plan: OpenPlan
    costs: Costs
    without: Sequence[Span] = ()
    deadline: float | None = None
    found: SearchResult = field(default_factory=SearchResult)

    @property
    def bounds(self) -> BoundsOf:
        """Bounds of the candidates."""
        return self.costs.bounds

    def candidate(self, choices: Choices) -> Candidate:
        """Some answers, with the diagnostics of lint's rules."""
        return self.plan.candidate(choices, without=self.without)

    def bounded(self, choices: Choices, least: float = -math.inf) -> float | None:
        """A bound of the cost of some answers, which is at least another; None where a bound excludes them."""
        return self.costs.bounded(self.candidate(choices), least)

    def unstyled(self, choices: Choices) -> Choices:
        """Some answers with the styles left open that a program chooses together."""
        holes = zip(self.plan.holes, choices, strict=True)
        return tuple(None if hole.line is not None else value for hole, value in holes)

    @property
    def best_cost(self) -> float:
        """The cost of the best candidate; infinite where there is none."""
        return math.inf if self.found.best is None else self.costs.of(self.found.best)

    @property
    def limit(self) -> float:
        """The cost below which a node is looked into."""
        return self.costs.limit(self.best_cost)

    def in_time(self) -> None:
        """Stop the search at its deadline.

        Raises:
            OutOfTimeError: it has passed.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTimeError
