"""Candidates whose holes that decide memory are answered together, beside answers of the others.

Those are joint answers (:mod:`legoai.cost.search.joint.decision`), mixtures of treatments
(:mod:`legoai.cost.search.branch_and_bound.mixtures`), and what bounds all treatments that are not tried one by one
(:mod:`legoai.cost.search.branch_and_bound.unrecomputed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from legoai.cost.search.branch_and_bound.misses import nearest
from legoai.cost.search.branch_and_bound.mixtures import Mixtures
from legoai.cost.search.branch_and_bound.nodes import Nodes
from legoai.cost.search.branch_and_bound.unrecomputed import Unrecomputed
from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.state import SearchState

_MOST_JOINT: Final = 3
"""Ways to answer the other holes, the best ones, beside which those that decide memory are answered jointly."""

Groups: TypeAlias = Mapping[Choices, Sequence[Evaluated]]
"""The evaluated candidates, by the choices of the other holes."""


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
    _begun: set[Choices] = field(default_factory=set)
    """Choices of the other holes beside which bounds exclude each listed value, and one was asked for nevertheless."""

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
        if self.state.found.best is None:
            return self._nearest(groups)
        least = {
            group: min(self.state.costs.of(item) for item in items if item.feasible)
            for group, items in groups.items()
            if any(item.feasible for item in items) and (early or self._may_gain(group))
        }
        won = self.joint.largest_gain(groups, self.state.costs) if early else math.inf
        for group in sorted(least, key=lambda group: least[group])[:_MOST_JOINT]:
            if group not in self.joint.answers and least[group] - won >= self.state.best_cost:
                continue  # joint answers are not likely to win more beside these than beside others
            wanted = self._answers(group, groups)
            if not wanted and not early and not self.joint.answers[group].programs:
                wanted = self._mixtures.likely(group)
            if wanted:
                return wanted
        return []

    def _answers(self, group: Choices, groups: Groups) -> list[Choices]:
        """What joint answers beside some choices need, and these; none where there is nothing left of it."""
        analysis = self.state.candidate(groups[group][0].choices).analysis
        assert analysis is not None
        return self.joint.next_candidates(group, groups, self.state.bounds.room(analysis), analysis)

    def _nearest(self, groups: Groups) -> list[Choices]:
        """What may be feasible where no listed value is: joint answers and mixtures, beside the nearest answers."""
        if self.nodes.least_untried(math.inf) == math.inf:
            return []  # bounds exclude whatever was not tried
        near = {group: self._distance(group, items) for group, items in groups.items() if self._is_left(group)}
        if len(near) < _MOST_JOINT:
            others = [one for one in self.nodes.least(_MOST_JOINT, math.inf) if self._is_group(one)]
            first = [self.joint.holes.first(one) for one in others if one not in near and one not in self._begun]
            self._begun.update(others)
            if first:
                return first
        found = sorted(near, key=lambda group: near[group])[:_MOST_JOINT]
        answers = (self._answers(group, groups) or self._mixtures.likely(group) for group in found)
        return next((wanted for wanted in answers if wanted), [])

    def _distance(self, group: Choices, items: Sequence[Evaluated]) -> tuple[float, float]:
        """How far candidates with some choices of the other holes are from what is required."""
        candidate = self.state.candidate(group)
        figures = [item.figures for item in items]
        return nearest(figures, candidate.plan.require, self.state.costs.capacity(candidate))

    def _is_left(self, group: Choices) -> bool:
        """Whether no bound excludes all treatments beside some choices of the other holes."""
        candidate = self.state.candidate(group)
        return not candidate.errors and self.state.costs.bounded(candidate, -math.inf) is not None

    def _is_group(self, choices: Choices) -> bool:
        """Whether nothing but what is answered jointly is open."""
        return all(
            value is not None or hole in self.joint.holes.holes for hole, value in enumerate(choices)
        ) and choices == self.joint.holes.group(choices)

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
