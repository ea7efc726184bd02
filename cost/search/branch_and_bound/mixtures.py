"""Mixtures of two treatments of equal blocks, which are tried one by one where a search would end with a gap.

The integer program of :mod:`legoai.cost.search.joint.decision` answers with the mixture that is best by its
predictions, and all others are bounded by what the best of them takes by active memory. Where few may be better than
the best candidate by their own bounds, these are simulated; where more may be, those that are estimated to be best.
Where there is no program, or nothing is feasible, a few are that are likely to be better or feasible.

What blocks recompute and keep is a sum over them. So the mean of two treatments, weighted by their blocks, bounds each
mixture of them, and excludes nearly all before there is a plan of any. Of blocks that are not equal, or of several
lists, nothing is bounded.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.search.branch_and_bound.misses import mean_of, misses
from legoai.cost.search.branch_and_bound.nodes import Nodes
from legoai.cost.search.candidate_bounds.bounds import Bounds
from legoai.cost.search.candidate_bounds.memory import least_memory
from legoai.cost.search.candidate_bounds.observed_peaks import peak_of
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.joint.holes import Values, WrittenRule
from legoai.cost.search.lower_bounds.memory_bound_kernels import repeated_blocks
from legoai.cost.search.memory.points import MemoryPoints
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.open_plan import Candidate

_AT_ONCE: Final = 2
"""Mixtures that are simulated before the next are chosen."""
MOST: Final = 48
"""Mixtures of one group that are simulated at most; where more may be better, those that are estimated to be best."""
MOST_LIKELY: Final = 16
"""Mixtures of one group that are simulated at most without a bound that leaves no others."""
_NEAR: Final = 0.005
"""Share by which a mixture that is predicted to miss a requirement may meet it nevertheless."""

_MISSED: Final = 0.02
"""Share by which the mean of two treatments' steps may be longer than the step of their mixture."""

_Bounded: TypeAlias = tuple[float, WrittenRule]


class _Uniform(NamedTuple):
    """What is known of a step whose blocks all have one treatment.

    Attributes:
        seconds: least, a sum over blocks.
        kept: bytes that all blocks keep for one micro batch, least.
        points: memory of the step; None where it was not simulated.
    """

    seconds: float
    kept: float
    points: MemoryPoints | None


@dataclass(slots=True)
class Mixtures:
    """Mixtures of the treatments of one plan's blocks, beside the choices of its other holes.

    Those are considered whose first blocks keep no more than the others, as in the integer program: what blocks keep
    is freed from the last one on, and room is needed while the others recompute.

    Args:
        state: of the search.
        joint: the holes that decide memory.
    """

    state: SearchState
    joint: JointMemory
    _asked: set[tuple[Choices, WrittenRule]] = field(default_factory=set)

    def wanted(self, nodes: Nodes, alone: Callable[[Iterable[Choices]], list[Choices]]) -> list[Choices]:
        """Those to be simulated next where the gap would not be small; none where it would stay.

        Args:
            nodes: of which the bounds of what is not tried one by one are raised.
            alone: gives what else is to be simulated of some groups before their mixtures, each candidate once.
        """
        limit = self.state.costs.nearly(self.state.best_cost)
        while (least := nodes.least_untried(limit)) < limit:
            group = next(one for one, bound in nodes.untried.items() if bound == least)
            if first := alone([group]):
                others = (one for one in sorted(nodes.untried, key=str) if one != group and nodes.untried[one] < limit)
                return [*first, *alone(others)]
            left = self._left(group)
            if left is None:
                return []
            if sum(bound < limit for bound, _ in left) > MOST:
                return self._best_estimated(group, left, limit)
            if found := self._next(group, left, limit):
                return found
            nodes.bound_untried(group, left[0][0] if left else math.inf)
        return []

    def least(self, group: Choices) -> float | None:
        """Least bound of the mixtures of a group; None where the memory of some treatment is not known."""
        opened = self.state.candidate(group).analysis
        if opened is None or not self._are_alike(group, opened):
            return None
        every = self._uniform(group)
        known = all(one.points is not None for _, _, one in every)
        return min((bound for bound, _ in self._mixed(opened, every)), default=math.inf) if known else None

    def beside_best(self) -> list[Choices]:
        """Those to be simulated next that are likely to be better than the best candidate, and alike in all else."""
        if self.state.found.best is None:
            return []
        group, cost = self.joint.holes.group(self.state.found.best.choices), self.state.best_cost
        left = self._left(group)
        if left is None:
            return []
        uniform = self._simulated(group)
        left = [one for one in left if one[0] < cost and self._predicted(group, one[1], uniform) < cost]
        if len(left) > MOST:
            return self._best_estimated(group, left, cost)
        heapq.heapify(left)
        return self._next(group, left, cost)

    def likely(self, group: Choices) -> list[Choices]:
        """Those of a group to be simulated next that are likely to be better than the best candidate.

        Where there is none, those that are likely to be feasible, and then those that are nearest to that.
        """
        uniform = self._simulated(group)
        candidate, any_feasible = self.state.candidate(group), self.state.found.best is not None
        ranked: list[tuple[float, float, WrittenRule]] = []
        for rule in self._rules(group):
            mean = self._mean(rule, uniform)
            if mean is not None and uniform[rule[0]].active <= uniform[rule[1]].active:
                missed = max(misses(mean, candidate.plan.require, self.state.costs.capacity(candidate)))
                cost = self._cost(group, rule, mean)
                if not any_feasible:
                    ranked.append((missed, cost, rule))
                elif missed <= _NEAR and cost < self.state.best_cost:
                    ranked.append((0.0, cost, rule))
        return self._first(group, [rule for _, _, rule in sorted(ranked)], MOST_LIKELY)

    def _best_estimated(self, group: Choices, left: Iterable[_Bounded], limit: float) -> list[Choices]:
        """Those to be simulated next of many whose bounds are below a limit: of least cost as the mean, if they fit."""
        uniform, best = self._simulated(group), self.state.best_cost
        most = best + _MISSED * abs(best)
        ranked: list[tuple[float, WrittenRule]] = []
        for bound, rule in left:
            mean = self._mean(rule, uniform) if bound < limit else None
            cost = math.inf if mean is None else self._cost(group, rule, mean)
            if cost < most and self._is_likely_to_fit(group, rule, uniform):
                ranked.append((cost, rule))
        return self._first(group, [rule for _, rule in sorted(ranked)], MOST)

    def _is_likely_to_fit(self, group: Choices, rule: WrittenRule, uniform: Mapping[int | None, Figures]) -> bool:
        """Whether a mixture fits if it fragments memory as that of its treatments does that fragments it less."""
        (low, high, some), analysis = rule, self.state.candidate(group).analysis
        assert analysis is not None
        first, other, room = uniform[low], uniform[high], self.state.bounds.room(analysis)
        if not first.points.blocks or not other.points.blocks:
            return True
        turn = other.points.peak + some * (first.points.released - other.points.released)
        peak = max(turn, peak_of([(first.points, some), (other.points, other.points.blocks - some)]))
        unused = min(one.reserved - one.active for one in (first, other))
        reserved = min(room.reserved, room.device - first.points.outside)
        return peak <= (1.0 + _NEAR) * room.active and peak + unused <= (1.0 + _NEAR) * reserved

    def _first(self, group: Choices, ranked: Iterable[WrittenRule], most: int) -> list[Choices]:
        """The first of some mixtures that no bound excludes; not more than so many of a group over all calls."""
        left = most - sum(one == group for one, _ in self._asked)
        found: list[Choices] = []
        for rule in itertools.islice(ranked, max(left, 0)):
            choices = self._chosen(group, rule)
            self._asked.add((group, rule))
            found += [] if self.state.bounded(choices) is None else [choices]
            if len(found) == _AT_ONCE:
                break
        return found

    def _rules(self, group: Choices) -> list[WrittenRule]:
        """Mixtures that were not asked for: those that bounds do not exclude, where there are bounds."""
        left = self._left(group)
        if left is not None:
            return [rule for _, rule in left]
        analysis = self.state.candidate(group).analysis
        if analysis is None or not self.joint.holes.is_rule_alone_open(group) or is_staged(analysis):
            return []
        pairs = itertools.permutations(self.joint.holes.listed(0), 2)
        every = ((*pair, some) for pair in pairs for some in range(1, self.joint.holes.blocks))
        return [rule for rule in every if (group, rule) not in self._asked]

    def _simulated(self, group: Choices) -> dict[int | None, Figures]:
        """The simulated steps of a group whose blocks all have one treatment, by its value."""
        holes = self.joint.holes
        alike = {holes.chosen(group, Values(value, None, None)): value for value in holes.listed(0)}
        return {alike[item.choices]: item.figures for item in self.state.found.evaluated if item.choices in alike}

    def _mean(self, rule: WrittenRule, uniform: Mapping[int | None, Figures]) -> dict[str, float] | None:
        """Figures of a mixture as the mean of the steps with each of its treatments alone; None where one is missing.

        In the steady state of a step a block adds as much whatever the others recompute.
        """
        low, high, some = rule
        if low not in uniform or high not in uniform:
            return None
        return mean_of(uniform[low], uniform[high], some / self.joint.holes.blocks)

    def _cost(self, group: Choices, rule: WrittenRule, figures: Mapping[str, float]) -> float:
        candidate = self.state.candidate(self._chosen(group, (None, rule[1], 0)))
        return self.state.costs.least(Bounds(step_time=figures["step_time seconds"]), candidate)

    def _predicted(self, group: Choices, rule: WrittenRule, uniform: Mapping[int | None, Figures]) -> float:
        """Cost of a mixture as that of the mean; least where a treatment was not simulated."""
        mean = self._mean(rule, uniform)
        return -math.inf if mean is None else self._cost(group, rule, mean)

    def _next(self, group: Choices, left: list[_Bounded], limit: float) -> list[Choices]:
        """Take those out of the heap that are simulated next: of least bounds, which are below a limit."""
        found: list[Choices] = []
        while left and left[0][0] < limit and len(found) < _AT_ONCE:
            bound, rule = heapq.heappop(left)
            choices = self._chosen(group, rule)
            own = self.state.bounded(choices, bound)
            if own is not None and own > bound:
                heapq.heappush(left, (own, rule))
            elif own is not None:
                self._asked.add((group, rule))
                found.append(choices)
        return found

    def _left(self, group: Choices) -> list[_Bounded] | None:
        """Mixtures that were not asked for, as a heap; None where more is open than the treatment of equal blocks."""
        opened = self.state.candidate(group).analysis
        if opened is None or not self._are_alike(group, opened):
            return None
        found = [one for one in self._mixed(opened, self._uniform(group)) if (group, one[1]) not in self._asked]
        heapq.heapify(found)
        return found

    def _are_alike(self, group: Choices, opened: Analysis) -> bool:
        """Whether nothing but the treatment of equal blocks is open."""
        alone = self.joint.holes.is_rule_alone_open(group) and not is_staged(opened)
        return alone and bool(repeated_blocks(opened.manifest))

    def _uniform(self, group: Choices) -> list[tuple[int, Candidate, _Uniform]]:
        """What is known of each listed treatment of all blocks."""
        bounds, found = self.state.bounds, []
        for value in self.joint.holes.listed(0):
            candidate = self.state.candidate(self._chosen(group, (None, value, 0)))
            if not candidate.errors and (analysis := candidate.analysis) is not None:
                memory = bounds.memory.kept(analysis), bounds.memory.peaks.uniform(analysis)
                found.append((value, candidate, _Uniform(bounds.as_sum(analysis), *memory)))
        return found

    def _mixed(self, opened: Analysis, every: Sequence[tuple[int, Candidate, _Uniform]]) -> Iterator[_Bounded]:
        """All mixtures of treatments that may fit, each with a bound of its cost."""
        room, blocks = self.state.bounds.for_tensors(opened), len(repeated_blocks(opened.manifest))
        for (low, candidate, first), (high, _, other) in itertools.permutations(every, 2):
            if _keeps_more(first, other):
                continue
            for some in range(1, blocks):
                parts = (first, some), (other, blocks - some)
                kept = sum(count * one.kept for one, count in parts) / blocks
                points = [(one.points, count) for one, count in parts if one.points is not None]
                if max(least_memory(opened, 0, kept), peak_of(points) if len(points) == len(parts) else 0.0) <= room:
                    seconds = sum(count * one.seconds for one, count in parts) / blocks
                    yield self.state.costs.least(Bounds(step_time=seconds), candidate), (low, high, some)

    def _chosen(self, group: Choices, rule: WrittenRule) -> Choices:
        holes = self.joint.holes
        return holes.chosen(group, Values(holes.value(0, (rule,)), None, None))


def _keeps_more(first: _Uniform, other: _Uniform) -> bool:
    """Whether blocks are known to keep more under the first of two treatments."""
    one, two = first.points, other.points
    return one is not None and two is not None and one.released > two.released
