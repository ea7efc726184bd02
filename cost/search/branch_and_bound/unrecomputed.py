"""Candidates that recompute nothing, simulated for the bound that they are of all other treatments of their blocks.

A step with the same degrees, units and schedule that recomputes something takes no less, whether the first fits in
memory or not, unless activations are copied to the host. Where a search would end with a gap, such candidates are
simulated as long as they may reduce it, and then those that recompute everything, which show how far steps exceed their
bounds (:mod:`legoai.cost.search.candidate_bounds.shortfalls`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.search.candidates import Choices
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules

_AT_ONCE: Final = 4
"""Candidates that are simulated together, at most: some take several times as long as others."""
_TREATMENTS: Final = ("none", "full")


def recomputes_nothing(analysis: Analysis) -> bool:
    """Whether no module of a plan without open treatments recomputes, and no compiler decides that it does."""
    return analysis.plan.compile is None and not recomputed_modules(analysis)


@dataclass(slots=True)
class Unrecomputed:
    """The candidates of one plan that recompute nothing, or else everything.

    Args:
        state: of the search.
        joint: the holes that decide memory.
    """

    state: SearchState
    joint: JointMemory
    _asked: set[Choices] = field(default_factory=set)

    def wanted(self, untried: dict[Choices, float], limit: float) -> list[Choices]:
        """Those to be simulated next; none where the least bound would not change, or does not matter.

        Args:
            untried: bounds of what is not tried one by one, by the choices that are decided.
            limit: cost below which a bound matters.
        """
        found: list[Choices] = []
        for choices in sorted(untried, key=lambda one: (untried[one], str(one))):
            complete = self._complete(choices)
            if untried[choices] >= limit or complete is None or len(found) == _AT_ONCE:
                break
            found.append(complete)
        self._asked.update(found)
        return found

    def of(self, groups: Iterable[Choices]) -> list[Choices]:
        """Those of some groups to be simulated next, each candidate once."""
        every = (complete for choices in groups if (complete := self._complete(choices)) is not None)
        found = list(itertools.islice(every, _AT_ONCE))
        self._asked.update(found)
        return found

    def _complete(self, choices: Choices) -> Choices | None:
        """The choices with a treatment that was not asked for; None where none is left, and where more is open.

        Where it is known how far steps exceed their bounds, whatever is recomputed, nothing is left.
        """
        hole = self.joint.holes.holes.checkpoint
        if hole is None or not self.joint.holes.is_rule_alone_open(choices):
            return None
        known = self.state.plan.holes[hole]
        texts = known.choices[: known.listed]
        values = [texts.index(text) for text in _TREATMENTS if text in texts]
        for complete in [(*choices[:hole], value, *choices[hole + 1 :]) for value in values]:
            analysis = self.state.candidate(complete).analysis
            if analysis is not None and self.state.bounds.shortfalls.are_known(analysis):
                return None
            if complete not in self._asked:
                return complete
        return None
