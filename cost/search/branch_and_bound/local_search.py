"""Local search around promising candidates, which gives branch and bound a good incumbent.

It starts at what a person would try first, and moves to candidates that differ from the incumbent in one choice, or in
two that are decided together, where :mod:`legoai.cost.search.branch_and_bound.effects` predicts that they are better
and fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from legoai.cost.search.branch_and_bound.effects import Amounts, Effects
from legoai.cost.search.branch_and_bound.neighbours import Neighbours
from legoai.cost.search.branch_and_bound.nodes import Nodes
from legoai.cost.search.candidate_bounds.memory import without_activations
from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.state import SearchState
from legoai.dsl.open_plan import Candidate
from legoai.specs.directives.require import MEMORY_METRICS

_AT_ONCE: Final = 4
"""Candidates that are evaluated before the next are chosen."""
_MEMORY: Final = dict(zip(MEMORY_METRICS, ("active", "reserved"), strict=True))
"""Requirements that are predicted, and what bounds them."""


class Searching(Protocol):
    """A search, as far as looking around needs it."""

    state: SearchState
    nodes: Nodes
    first_feasible: bool

    def evaluate_early(self, chosen: Sequence[Choices]) -> None:
        """Evaluate answers of which styles may be open."""

    def restyled(self, *, early: bool = False) -> bool:
        """Evaluate other styles beside the best of other answers; false where nothing is left of it."""

    def jointly(self, *, early: bool = False) -> bool:
        """Evaluate what joint answers of memory need, and these; false where nothing is left of it."""


class LocalSearch:
    """Looks at likely candidates.

    Args:
        search: which evaluates them.
        near: the candidates of its plan.
    """

    def __init__(self, search: Searching, near: Neighbours) -> None:
        self._search, self._near, self._state = search, near, search.state
        self._effects = Effects(self._bound)
        self._learnt = 0
        self._tried: set[Choices] = set()
        """What was evaluated, and what has no legal styles; styles are left open in them."""

    def run(self) -> None:
        """Evaluate likely candidates until one is feasible; then what lies beside the best, as long as that helps."""
        for several in self._near.first():
            if self._state.found.best is not None:
                break
            self._evaluate(several)
        if self._search.first_feasible:
            return
        while self._state.found.best is None and self._search.restyled(early=True):
            pass
        found, before = self._state.found, None
        while found.best is not before:
            before = found.best
            for moving in (False, True):
                self._descend(moving=moving)
            while self._search.jointly(early=True) or self._search.restyled(early=True):
                pass

    def _descend(self, *, moving: bool) -> None:
        """Go to the best of the candidates beside the best one, until none is better.

        Args:
            moving: to other degrees too, where all has to be captured anew, and bounds are looser.
        """
        found, before = self._state.found, None
        while found.best is not None and found.best is not before:
            before = found.best
            likely = sorted(self._likely(before, moving=moving))
            self._evaluate([choices for _, choices in likely[:_AT_ONCE]])

    def _likely(self, best: Evaluated, *, moving: bool) -> Iterator[tuple[float, Choices]]:
        """What is likely to be better than the best candidate, and to fit, with the cost that is predicted."""
        state, base = self._state, self._state.unstyled(best.choices)
        degrees_of = self._search.nodes.degrees_of
        self._learn()
        incumbent = state.costs.of(best)
        for choices in self._near.beside(base):
            state.in_time()
            if choices in self._tried or (not moving and degrees_of(choices) != degrees_of(base)):
                continue
            candidate = state.candidate(choices)
            least = state.costs.bounded(candidate, -math.inf)
            if least is None or least >= incumbent:
                continue
            amounts = self._effects.predicted(base, choices)
            if amounts is not None and amounts.cost < incumbent and self._fits(candidate, amounts):
                yield amounts.cost, choices

    def _fits(self, candidate: Candidate, amounts: Amounts) -> bool:
        """Whether memory is likely to do, and what is required of it to be met."""
        limits = (item for item in candidate.plan.require if item.limits_memory)
        return amounts.reserved <= self._state.costs.capacity(candidate) and all(
            getattr(amounts, _MEMORY[item.metric]) <= item.bound for item in limits
        )

    def _evaluate(self, chosen: Sequence[Choices]) -> None:
        self._tried.update(chosen)
        self._search.evaluate_early(chosen)

    def _learn(self) -> None:
        """Update the effects of answers by what was evaluated since the last time."""
        for item in self._state.found.evaluated[self._learnt :]:
            analysis = self._state.candidate(item.choices).analysis
            assert analysis is not None
            held = item.figures.reserved, item.figures.active, without_activations(analysis)
            self._effects.observe(self._state.unstyled(item.choices), Amounts(self._state.costs.of(item), *held))
        self._learnt = len(self._state.found.evaluated)

    def _bound(self, choices: Choices) -> Amounts | None:
        candidate = self._state.candidate(choices)
        if candidate.errors or candidate.analysis is None:
            return None
        bounds = self._state.costs.bounds(candidate.analysis)
        cost = self._state.costs.least(bounds, candidate)
        if math.isinf(cost):  # of utilisation nothing is bounded, but that it is less where a step takes longer
            cost = -1 / bounds.step_time if bounds.step_time else 0.0
        return Amounts(cost, bounds.memory, bounds.memory, without_activations(candidate.analysis))
