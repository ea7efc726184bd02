"""Priority queue of the open nodes of a search, with bounds of the choices that are not enumerated."""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Iterator, Set
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from legoai.cost.search.candidates import Choices, order_of
from legoai.cost.search.evaluation.evaluator import OutOfTimeError
from legoai.cost.search.stages.assignment import Assignment
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.parallelism.shard import shard_on_tp
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.open_plan import Candidate
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.pipeline import Pipeline

if TYPE_CHECKING:
    from legoai.cost.search.placements.styles import Placements

_FEW: Final = 3
"""Answers of a hole, at most, that are bounded each to bound a node in which it is open."""
_MOST_ADDED: Final = 3
"""Splits into stages, or buckets, that are added to the listed ones, for each way to answer the other holes."""

_PLACED: Final = 16
"""Effort of a node for which a program has to choose styles."""
_STAGED: Final = 4
"""Effort of a node with stages, whose schedules are listed to bound it."""

Node: TypeAlias = tuple[float, int, Choices]
"""A bound of the cost, the number of open holes, and the choices."""


class Nodes:
    """The open nodes of one search.

    Args:
        state: of the search; what is counted and refused is noted in it.
        divided: holes for which a division of blocks may be best, of which not all are tried.

    Attributes:
        heap: those that were not looked into, the least bound first.
        untried: bounds of the cost of splits into stages, of buckets, styles and divisions of blocks, tried or not, by
            the other answers.
        early: candidates that were evaluated before the tree has come to them.
        preferred: the form of the standard layouts whose styles are tried beside the program's; None for none.
    """

    def __init__(self, state: SearchState, divided: Set[int | None] = frozenset()) -> None:
        self.order = order_of(state.plan.holes)
        self.heap: list[Node] = []
        self.untried: dict[Choices, float] = {}
        self.early: set[Choices] = set()
        self._state, self.divided = state, divided
        self._degrees = [index for index, hole in enumerate(state.plan.holes) if hole.owner in (Mesh, Batch)]
        self.preferred: int | None = None
        self._placements: Placements | None = None
        self._placed: dict[Choices, Choices | None] = {}
        """Styles of the program, by the other answers; None where it has none."""
        self._pushed: dict[Choices, list[Choices]] = {}
        """Styles that are tried, by the other answers that the tree has come to."""
        self._added: dict[Choices, set[int]] = {}
        self._known: dict[Choices, object] = {}
        """What was known of all candidates when an open node was bounded."""
        self._tightened: dict[Choices, object] = {}
        """The same when one was bounded by all answers of its holes of few."""

    def expand(self, node: Node) -> None:
        """Put the answers for the first open hole of a node in its place."""
        cost, _, choices = node
        hole = self._first_open(choices)
        if self._state.plan.holes[hole].line is not None:
            self._place(node)
            return
        try:
            idle = self._is_idle(choices, hole)
            for value in range(1 if idle else self._state.plan.holes[hole].listed):
                chosen = (*choices[:hole], value, *choices[hole + 1 :])
                candidate = self._state.candidate(chosen)
                if candidate.errors:
                    self.refuse(chosen, candidate)
                else:
                    self.push(chosen, candidate, cost)
            if hole in self.divided and choices == self.group(choices):  # else the cost is that of one treatment
                self.bound_untried(choices, cost)
            if idle:
                listed = self._state.plan.holes[hole].listed
                self._state.found.bounded += self._ways(choices) // listed * (listed - 1)
            elif self._state.plan.holes[hole].assigns:
                self.bound_untried(choices, cost)
                candidate = self._state.candidate(choices)
                found = None if candidate.analysis is None else self._state.bounds.assignment(candidate.analysis)
                self.add(choices, hole, split_of(found), cost)
            elif self._state.plan.holes[hole].buckets:
                self.bound_untried(choices, cost)
        except KeyboardInterrupt:
            heapq.heappush(self.heap, node)
            raise

    def effort(self, node: Node) -> int:
        """How long it takes to expand a node that is not complete, compared with one that has no stages."""
        if self._state.plan.holes[self._first_open(node[2])].line is not None:
            return _PLACED
        analysis = self._state.candidate(node[2]).analysis
        with contextlib.suppress(Undecided):
            return _STAGED if analysis is not None and is_staged(analysis) else 1
        return 1

    def _first_open(self, choices: Choices) -> int:
        return next(index for index in self.order if choices[index] is None)

    def push(self, choices: Choices, candidate: Candidate, least: float) -> None:
        """Open a node whose cost is bounded, unless a bound excludes it."""
        settled = self._with_idle_styles(choices, candidate)
        if settled != choices:
            self._state.found.bounded += self.below(choices) - self.below(settled)
            choices, candidate = settled, self._state.candidate(settled)
        bounded = self._state.costs.bounded(candidate, least)
        if bounded is None:
            self._state.found.bounded += self.below(choices)
            return
        undecided = sum(value is None for value in choices)
        self._known[choices] = self._state.bounds.known
        heapq.heappush(self.heap, (bounded, undecided, choices))

    def bounded_anew(self, node: Node) -> bool:
        """Bound a popped node again by what was observed since, and push it if its bound is now greater."""
        cost, _, choices = node
        if self._known.get(choices) == self._state.bounds.known:
            return False
        self._known[choices] = self._state.bounds.known
        bounded = self._state.bounded(choices, cost)
        if bounded is None:
            self._state.found.bounded += self.below(choices)
        elif bounded > cost:
            heapq.heappush(self.heap, (bounded, *node[1:]))
        return bounded is None or bounded > cost

    def tightened(self, node: Node) -> bool:
        """Open a node again that was taken, if each answer for some hole of few raises its bound or is excluded.

        A hole that is answered late, such as how units are resharded, may decide what its node costs at least, and
        bounding its few answers takes less time than a simulation that would tighten all of them.
        """
        cost, undecided, choices = node
        known = self._state.bounds.known
        if self._tightened.get(choices) == known:
            return False
        self._tightened[choices] = known
        least = max((self._least_of(choices, hole, cost) for hole in self._of_few(choices)), default=cost)
        if least == math.inf:  # without a bound, a figure to be maximized is minus infinity
            self._state.found.bounded += self.below(choices)
        elif least > cost:
            heapq.heappush(self.heap, (least, undecided, choices))
        return least > cost

    def _of_few(self, choices: Choices) -> Iterator[int]:
        """Open holes of few answers, each of which is tried by itself."""
        for hole, value in enumerate(choices):
            if value is None and self._is_decided(hole) and 1 < self._state.plan.holes[hole].listed <= _FEW:
                yield hole

    def _least_of(self, choices: Choices, hole: int, cost: float) -> float:
        """The least bound of a node with any answer for a hole; infinite where bounds exclude all."""
        found = [math.inf]
        for value in range(self._state.plan.holes[hole].listed):
            candidate = self._state.candidate((*choices[:hole], value, *choices[hole + 1 :]))
            if candidate.errors:
                return cost  # lint refuses it where the answer is tried
            bounded = self._state.costs.bounded(candidate, cost)
            found += [] if bounded is None else [bounded]
        return min(found)

    def raise_least(self, below: float) -> None:
        """Bound the node of least bound anew, until none that is less than `below` would have a greater one."""
        while self.heap and self.heap[0][0] < below:
            node = heapq.heappop(self.heap)
            if not self.bounded_anew(node):
                heapq.heappush(self.heap, node)
                return

    def least(self, count: int, below: float) -> list[Choices]:
        """Those of least bounds, of open nodes and of what is not tried one by one."""
        left = [(bound, choices) for choices, bound in self.untried.items()]
        left += [(bound, choices) for bound, _, choices in self.heap]
        return [choices for bound, choices in heapq.nsmallest(count, left, key=itemgetter(0)) if bound < below]

    def add(self, choices: Choices, hole: int, text: str | None, least: float) -> None:
        """Add a split into stages, or buckets, to those that are tried."""
        if text is None:
            return
        value = self._state.plan.add(hole, text)
        chosen = (*choices[:hole], value, *choices[hole + 1 :])
        added = self._added.setdefault((*choices[:hole], None, *choices[hole + 1 :]), set())
        candidate = self._state.candidate(chosen)
        new = value >= self._state.plan.holes[hole].listed and value not in added
        if new and len(added) < _MOST_ADDED and not candidate.errors:
            added.add(value)
            self._state.found.total += 1
            self.push(chosen, candidate, least)

    def styled(self, choices: Choices) -> Choices | None:
        """The choices with styles, if those are open; None where none are legal, or fit."""
        if None not in choices:
            return choices
        if choices not in self._placed:
            self._placed[choices] = self.placements.complete(
                choices, without=self._state.without, deadline=self._state.deadline
            )
        return self._placed[choices]

    def ways(self, choices: Choices) -> list[Choices]:
        """The choices with styles, of the program and of the preferred form of the standard layouts, where legal."""
        found = [self.styled(choices)]
        if None in choices and self.preferred is not None:
            forms = self.placements.usual(choices, without=self._state.without)
            found += forms[self.preferred : self.preferred + 1]
        legal = dict.fromkeys(one for one in found if one is not None)
        return [one for one in legal if not self._state.candidate(one).errors]

    @property
    def placements(self) -> Placements:
        """The program that chooses styles."""
        if self._placements is None:
            from legoai.cost.search.placements.styles import (
                Placements,  # solvers are imported where styles are open only
            )

            self._placements = Placements(self._state.plan, self._state.bounds.machine)
        return self._placements

    def placed(self, choices: Choices) -> Choices | None:
        """The styles that the program has chosen beside the other answers; None for none so far."""
        return self._placed.get(choices)

    def is_placed(self, choices: Choices) -> bool:
        """Whether the tree has come to the styles beside the other answers."""
        return choices in self._pushed

    def take_in(self, choices: Choices) -> bool:
        """Count a complete answer no longer as one with other styles than those that are tried, if it was."""
        for group, tried in self._pushed.items():
            if all(value in (None, own) for value, own in zip(group, choices, strict=True)):
                if choices in tried:
                    return False
                tried.append(choices)
                self._state.found.left_out -= 1
                return True
        return False

    def _ways(self, choices: Choices) -> int:
        """How many complete answers there are below a node."""
        holes = zip(self._state.plan.holes, choices, strict=True)
        return math.prod(hole.listed for hole, index in holes if index is None)

    def below(self, choices: Choices) -> int:
        """How many complete answers a node stands for that were not evaluated early."""
        return self._ways(choices) - sum(
            all(value in (None, own) for value, own in zip(choices, early, strict=True)) for early in self.early
        )

    def reopen(self, nodes: list[Node]) -> None:
        """Open nodes again that were taken, and not looked into."""
        while nodes:
            heapq.heappush(self.heap, nodes.pop())

    def group(self, choices: Choices) -> Choices:
        """The answers for all other holes than those for which a division of blocks may be best."""
        return tuple(None if hole in self.divided else value for hole, value in enumerate(choices))

    def degrees_of(self, choices: Choices) -> Choices:
        """The answers for degrees and micro batch."""
        return tuple(choices[index] for index in self._degrees)

    def bound_untried(self, choices: Choices, least: float) -> None:
        """Bound the cost of what is not tried one by one beside some answers, by one more bound."""
        self.untried[choices] = max(least, self.untried.get(choices, -math.inf))

    def bound_untried_anew(self, choices: Choices, observed: float) -> None:
        """As :meth:`bound_untried`, by a bound from a simulated candidate and by that of the answers themselves."""
        bounded = self._state.bounded(choices, observed)
        self.bound_untried(choices, math.inf if bounded is None else bounded)

    def least_untried(self, below: float) -> float:
        """The least bound of what is not tried one by one; at least `below`, if it is not less.

        A bound from when other holes were open is asked for anew with these decided, as long as it is the least.
        """
        while self.untried:
            choices = min(self.untried, key=self.untried.__getitem__)
            least = self.untried[choices]
            hole = next((index for index in self.order if choices[index] is None and self._is_decided(index)), None)
            if least >= below or (hole is None and not self._left_anew(choices)):
                return least
            if hole is None:
                continue
            del self.untried[choices]
            idle = self._is_idle(choices, hole)
            for value in range(1 if idle else self._state.plan.holes[hole].listed):
                chosen = (*choices[:hole], value, *choices[hole + 1 :])
                candidate = self._state.candidate(chosen)
                bounded = None if candidate.errors else self._state.costs.bounded(candidate, least)
                if bounded is not None:
                    self.bound_untried(chosen, bounded)
        return math.inf

    def _left_anew(self, choices: Choices) -> bool:
        """Bound what is not tried beside some answers by all that is known now, and say whether that is more."""
        least = self.untried[choices]
        bounded = self._state.bounded(choices, least)
        if bounded is None:
            del self.untried[choices]
        else:
            self.untried[choices] = bounded
        return bounded is None or bounded > least

    def _is_decided(self, hole: int) -> bool:
        """Whether each answer of a hole is tried by itself."""
        one = self._state.plan.holes[hole]
        return not (hole in self.divided or one.assigns or one.buckets or one.line is not None)

    def _is_idle(self, choices: Choices, hole: int) -> bool:
        """Whether all values of a hole mean the same beside these choices."""
        if self._state.plan.holes[hole].owner is not Pipeline:
            return False
        return not self._state.plan.matters(hole, self._state.candidate(choices))

    def _with_idle_styles(self, choices: Choices, candidate: Candidate) -> Choices:
        """The choices with a style in each open hole, where `tp` has one rank, on which all styles mean the same."""
        holes = zip(self._state.plan.holes, choices, strict=True)
        if candidate.analysis is None or not any(hole.line is not None and index is None for hole, index in holes):
            return choices
        try:
            if shard_on_tp(candidate.analysis) is not None:
                return choices
        except Undecided:
            return choices
        holes = zip(self._state.plan.holes, choices, strict=True)
        return tuple(0 if hole.line is not None and index is None else index for hole, index in holes)

    def _place(self, node: Node) -> None:
        """Go on with the styles that the program of placements chooses, and those of a form that was better."""
        least, _, choices = node
        try:
            ways = self.ways(choices)
        except (KeyboardInterrupt, OutOfTimeError):
            heapq.heappush(self.heap, node)
            raise
        self._state.found.left_out += self.below(choices) - sum(map(self.below, ways))
        self._pushed[choices] = ways
        self.bound_untried(choices, least)
        for complete in ways:
            self.push(complete, self._state.candidate(complete), least)

    def refuse(self, choices: Choices, candidate: Candidate) -> None:
        """Count what lint refuses."""
        first = candidate.errors[0]
        self._state.found.refused[first.code] += self.below(choices)
        self._state.found.errors.setdefault(first.code, first)


def split_of(found: Assignment | None) -> str | None:
    """A split into stages as a plan writes it."""
    return None if found is None or not found.counts else f"[{', '.join(map(str, found.counts))}]"
