"""Styles on `tp` beside those that the program of placements chooses first, for the best of the other answers.

The program ignores the host's time and some of the memory. So the styles of the model's standard layouts are simulated
too; and where memory is limited, the program is solved again within a limit that is corrected by the memory that its
last solution was simulated to take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from legoai.cost.search.branch_and_bound.misses import nearest
from legoai.cost.search.branch_and_bound.nodes import Nodes
from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.parallelism.shard import shard_on_tp

if TYPE_CHECKING:
    from legoai.cost.search.placements.styles import Placements, Styled

_MOST_BESIDE: Final = 3
"""Ways to answer the other holes beside which other styles are tried, of each kind: the best, and the nearest ones."""
_MOST_BEST: Final = 8
"""Of the best, where other styles have won as much beside one that these may be better by it."""
_MOST_PROGRAMS: Final = 6
"""Programs that are solved again beside some answers."""


@dataclass(slots=True)
class _Beside:
    """What was tried beside some answers of the other holes.

    Attributes:
        usual: whether the styles of standard layouts were asked for.
        programs: that were solved.
        last: solution of the last of them that had one.
        seen: all solutions.
        most: the limit of memory for the next program, in bytes; None before the first.
    """

    usual: bool = False
    programs: int = 0
    last: Styled | None = None
    seen: set[Choices] = field(default_factory=set)
    most: float | None = None


@dataclass(slots=True)
class OtherStyles:
    """Other styles, in one search.

    Args:
        state: of the search.
        nodes: whose styles the program chooses.
    """

    state: SearchState
    nodes: Nodes
    _beside: dict[Choices, _Beside] = field(default_factory=dict)

    @property
    def _placements(self) -> Placements:
        return self.nodes.placements

    def wanted(self) -> list[Choices]:
        """Candidates to evaluate next; none where nothing is left of them."""
        groups: dict[Choices, list[Evaluated]] = {}
        for item in self.state.found.evaluated:
            groups.setdefault(self.state.unstyled(item.choices), []).append(item)
        self._prefer()
        for group in (*self._best(groups), *self._near(groups), *self._excluded(groups)):
            if not self._is_open(group):
                continue
            known = {item.choices: item for item in groups.get(group, ())}
            found = self._usual(group, known) or self._again(group, known)
            if found:
                return found
        return []

    def _prefer(self) -> None:
        """Let the form of the standard layouts be tried everywhere that the best candidate has, if it has one."""
        best = self.state.found.best
        if best is not None:
            group = self.state.unstyled(best.choices)
            forms = self._placements.usual(group, without=self.state.without) if self._is_open(group) else []
            own = best.choices != self.nodes.placed(group) and best.choices in forms
            self.nodes.preferred = forms.index(best.choices) if own else None

    def _best(self, groups: dict[Choices, list[Evaluated]]) -> Iterator[Choices]:
        """Yield the other answers of the best feasible candidates, by what they cost with the program's own styles.

        Those beside which no style matters are among them, as they too may be better than what is tried.
        """
        first = {group: self._first(group, items) for group, items in groups.items() if _feasible(items)}
        won = max((first[one] - self._least(groups[one]) for one in self._beside if one in first), default=0.0)
        ordered = sorted(first, key=lambda group: (first[group], _key(group)))
        for place, group in enumerate(ordered[:_MOST_BEST]):
            if place < _MOST_BESIDE or first[group] - won < self.state.best_cost:
                yield group

    def _near(self, groups: dict[Choices, list[Evaluated]]) -> Iterator[Choices]:
        """Yield the other answers that come nearest to what is required, and would be better if they met it."""
        far = {
            group: nearest(
                [item.figures for item in items], candidate.plan.require, self.state.costs.capacity(candidate)
            )
            for group, items in groups.items()
            if not _feasible(items) and self._least(items) < self.state.limit and self._is_open(group)
            for candidate in [self.state.candidate(items[0].choices)]
        }
        begun = {group for group in far if group in self._beside}
        ordered = sorted(far, key=lambda group: (group not in begun, far[group], _key(group)))
        most = _MOST_BESIDE if self.state.found.best is None else 1
        yield from ordered[: max(most, len(begun))]

    def _excluded(self, groups: dict[Choices, list[Evaluated]]) -> Iterator[Choices]:
        """Yield other answers beside which the program has no styles or a bound excludes them, if nothing is feasible.

        That of least bound comes first.
        """
        if self.state.found.best is not None:
            return
        left = {
            group: bound
            for group, bound in self.nodes.untried.items()
            if group not in groups and self.nodes.is_placed(group) and bound < self.state.limit and self._is_open(group)
        }
        begun = {group for group in left if group in self._beside}
        ordered = sorted(left, key=lambda group: (group not in begun, left[group], _key(group)))
        yield from ordered[: max(_MOST_BESIDE, len(begun))]

    def _is_open(self, group: Choices) -> bool:
        """Whether styles alone are open, and matter."""
        holes = zip(self.state.plan.holes, group, strict=True)
        if any(index is None and hole.line is None for hole, index in holes) or None not in group:
            return False
        candidate = self.state.candidate(group)
        return not candidate.errors and candidate.analysis is not None and shard_on_tp(candidate.analysis) is not None

    def _usual(self, group: Choices, known: dict[Choices, Evaluated]) -> list[Choices]:
        """The styles of the standard layouts that are legal and that no bound excludes, once."""
        beside = self._beside.setdefault(group, _Beside())
        if beside.usual:
            return []
        beside.usual = True
        forms = self._placements.usual(group, without=self.state.without)
        return [one for one in dict.fromkeys(forms) if one is not None and one not in known and self._may_win(one)]

    def _may_win(self, choices: Choices) -> bool:
        candidate = self.state.candidate(choices)
        if candidate.errors:
            return False
        least = self.state.costs.bounded(candidate, -math.inf)
        return least is not None and least < self.state.limit

    def _again(self, group: Choices, known: dict[Choices, Evaluated]) -> list[Choices]:
        """The program's styles within a corrected limit; none where it has no others, or memory is not limited."""
        beside = self._beside[group]
        analysis = self.state.candidate(group).analysis
        assert analysis is not None
        limit = min(self.state.bounds.room(analysis))
        if limit == math.inf:
            return []
        if beside.most is None:
            beside.most = limit
        elif beside.last is not None and (over := self._over(beside.last.choices, known)) is not None:
            beside.most = beside.last.bytes - over
        else:
            return []
        while beside.programs < _MOST_PROGRAMS:
            beside.programs += 1
            found = self._placements.within(
                group, beside.most, without=self.state.without, deadline=self.state.deadline
            )
            if found is None and beside.last is None:
                if beside.most == math.inf:
                    break
                beside.most = math.inf  # the bytes that are counted need not all be held at once
                continue
            if found is None:
                assert beside.last is not None
                beside.most = (beside.most + beside.last.bytes) / 2.0  # not all styles have the error of the last ones
                continue
            if found.choices in beside.seen:
                break
            beside.seen.add(found.choices)
            beside.last = found
            over = self._over(found.choices, known)
            if over is None:
                if self._may_win(found.choices):
                    return [found.choices]
                break
            beside.most = found.bytes - over
        beside.programs = _MOST_PROGRAMS
        return []

    def _over(self, choices: Choices, known: dict[Choices, Evaluated]) -> float | None:
        """Bytes by which a candidate exceeds the limits of memory, by its simulation or else if by its bound."""
        candidate = self.state.candidate(choices)
        assert candidate.analysis is not None
        room = self.state.bounds.room(candidate.analysis)
        if choices in known:
            metrics = known[choices].figures.metrics
            active, reserved = metrics["peak_memory bytes"], metrics["reserved_memory bytes"]
            return max(active - room.active, reserved - min(room.reserved, room.device))
        over = self.state.bounds(candidate.analysis).memory - self.state.bounds.for_tensors(candidate.analysis)
        return over if over > 0.0 else None

    def _first(self, group: Choices, items: Sequence[Evaluated]) -> float:
        """The cost of the program's own styles, or else the least."""
        own = self.nodes.placed(group)
        return next((self.state.costs.of(item) for item in items if item.choices == own), self._least(items))

    def _least(self, items: Sequence[Evaluated]) -> float:
        """The least cost of the feasible ones; of all, if none is."""
        return min(self.state.costs.of(item) for item in [one for one in items if one.feasible] or items)


def _feasible(items: Sequence[Evaluated]) -> bool:
    return any(item.feasible for item in items)


def _key(choices: Choices) -> tuple[int, ...]:
    """A key by which choices are in order."""
    return tuple(-1 if index is None else index for index in choices)
