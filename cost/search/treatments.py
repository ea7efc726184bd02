"""Candidates whose holes that decide memory are answered together, beside answers of the others.

Those are joint answers (:mod:`legoai.cost.search.joint_memory`), mixtures of treatments
(:mod:`legoai.cost.search.mixtures`), and what bounds all treatments that are not tried one by one
(:mod:`legoai.cost.search.unrecomputed`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.joint_memory import JointMemory
from legoai.cost.search.mixtures import Mixtures
from legoai.cost.search.nodes import Nodes
from legoai.cost.search.state import SearchState
from legoai.cost.search.unrecomputed import Unrecomputed

_MOST_JOINT: Final = 3
"""Ways to answer the other holes, the best ones, beside which those that decide memory are answered jointly."""


@dataclass(slots=True)
class Treatments:
    """Answers of the holes that decide memory, in one search.

    Args:
        state: of the search.
        joint: the holes that decide memory.
        nodes: with the bounds of what is not tried one by one.
    """

    state: SearchState
    joint: JointMemory
    nodes: Nodes
    _mixtures: Mixtures = field(init=False)
    _unrecomputed: Unrecomputed = field(init=False)

    def __post_init__(self) -> None:
        """Mixtures and bounds of the same plan."""
        self._mixtures = Mixtures(self.state, self.joint)
        self._unrecomputed = Unrecomputed(self.state, self.joint)

    def jointly(self, *, early: bool) -> list[Choices]:
        """What joint answers beside the best others need, and these; none where nothing is left of it.

        Args:
            early: before the tree has come to the answers of the holes that are decided jointly.
        """
        groups: dict[Choices, list[Evaluated]] = {}
        for item in self.state.found.evaluated:
            groups.setdefault(self.joint.holes.group(item.choices), []).append(item)
        least = {
            group: min(self.state.costs.of(item) for item in items if item.feasible)
            for group, items in groups.items()
            if any(item.feasible for item in items) and (early or self._may_gain(group))
        }
        won = self.joint.largest_gain(groups, self.state.costs) if early else math.inf
        for group in sorted(least, key=lambda group: least[group])[:_MOST_JOINT]:
            if group not in self.joint.answers and least[group] - won >= self.state.best_cost:
                continue  # joint answers are not likely to win more beside these than beside others
            analysis = self.state.candidate(groups[group][0].choices).analysis
            assert analysis is not None
            room = self.state.bounds.room(analysis)
            if wanted := self.joint.next_candidates(group, groups, room, analysis):
                return wanted
        return []

    def _may_gain(self, group: Choices) -> bool:
        """Whether joint answers beside some choices may be better than the best candidate: by much, if not its own."""
        assert self.state.found.best is not None
        untried = self.nodes.untried.get(group, math.inf)
        if group == self.joint.holes.group(self.state.found.best.choices):
            return untried < self.state.best_cost
        limit, bounded = self.state.costs.nearly(self.state.best_cost), self.state.bounded(group, untried)
        if bounded is None or bounded >= limit:
            return False
        if (least := self._mixtures.least(group)) is not None:
            self.nodes.bound_untried(group, least)
        return least is None or least < limit

    def beside_best(self) -> list[Choices]:
        """Mixtures that are likely to be better than the best candidate, and alike in all else."""
        return self._mixtures.beside_best()

    def bounding(self) -> list[Choices]:
        """What bounds treatments that were not tried; none where the gap is small, or where it would stay."""
        if self.state.found.best is None:
            return []
        limit = self.state.costs.nearly(self.state.best_cost)
        self.nodes.least_untried(limit)
        wanted = self._unrecomputed.wanted(self.nodes.untried, limit)
        return wanted or self._mixtures.wanted(self.nodes, self._unrecomputed.of)
