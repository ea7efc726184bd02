"""Graph of the open styles of a block: every choice of styles is a path through the layouts between its steps.

A state holds the layouts of the tensors that later steps read, and the styles that later steps share. A path from the
first state to the last is a choice of styles; its edges have the cost of each step on a rank. Each choice that lint
accepts is a path. Some that it refuses are paths too, which makes the least path no longer.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.search.lower_bounds.open_holes.block_steps import BlockSteps, Held, Item, Made

_State: TypeAlias = tuple[Held | int, ...]
"""Tensors, and styles by their number among those of their hole, in the order of the slots that are live."""
_Slot: TypeAlias = tuple[str, int]
"""A value, or a hole."""
_Items: TypeAlias = tuple[Item, ...]
_Edges: TypeAlias = dict[tuple[int, int], list[_Items]]
"""What may be done between two states, by these."""

_MOST_STATES: Final = 2_000
"""Between two steps, from which on nothing is known of a block."""


class Edge(NamedTuple):
    """From one state to another, with the number of what is done between them."""

    source: int
    target: int
    does: int


@dataclass(frozen=True, slots=True)
class StyleGraph:
    """The paths of a block.

    Attributes:
        steps: edges from the states behind one step to those behind the next; of these there is one at first and last.
        does: what edges do, by the number that they have for it.
        results: how what the block gives may lie.
    """

    steps: tuple[tuple[Edge, ...], ...]
    does: tuple[_Items, ...]
    results: frozenset[Held]

    @property
    def items(self) -> frozenset[Item]:
        """All that is done on some path."""
        return frozenset(itertools.chain.from_iterable(self.does))

    def least(self, seconds: Mapping[Item, float]) -> float:
        """Seconds of the path that takes least."""
        each = [sum(seconds[item] for item in items) for items in self.does]
        reached = {0: 0.0}
        for edges in self.steps:
            following: dict[int, float] = {}
            for source, target, does in edges:
                total = reached[source] + each[does]
                if total < following.get(target, math.inf):
                    following[target] = total
            reached = following
        return reached[0]


def style_graph(flow: BlockSteps, given: Sequence[Collection[Held]]) -> StyleGraph | None:
    """The paths of a block; None where there are none, or too many states.

    Args:
        flow: steps of the block.
        given: how each of its arguments may lie.
    """
    live: list[_Slot] = [("value", index) for index in range(len(given))]
    states: dict[_State, int] = {state: number for number, state in enumerate(itertools.product(*given))}
    layers: list[_Edges] = [{(0, number): [()] for number in states.values()}]
    last = _last_uses(flow)
    for place in range(len(flow.steps)):
        step = _Step(flow, place, live, last)
        following: dict[_State, int] = {}
        edges: _Edges = defaultdict(list)
        for state, number in states.items():
            for target, items in step.taken(state):
                _note(edges[number, following.setdefault(target, len(following))], items)
        if not following or len(following) > _MOST_STATES:
            return None
        layers.append(edges)
        live, states = step.after, following
    layers.append({(number, 0): [()] for number in states.values()})
    results = frozenset(held for state in states for held in state if isinstance(held, Held))
    return _numbered(_merged(layers), results)


def _last_uses(flow: BlockSteps) -> dict[_Slot, int]:
    """The last step that has each value or hole; that behind all of what the block gives."""
    last: dict[_Slot, int] = {}
    for place, step in enumerate(flow.steps):
        last.update((("value", value), place) for value in step.reads)
        hole = flow.hole(place)
        if hole is not None:
            last["hole", hole] = place
    last["value", flow.result] = len(flow.steps)
    return last


class _Step:
    """A step between states.

    Args:
        flow: steps of the block.
        place: of this one.
        live: slots of the states before it.
        last: the last step that has each slot.

    Attributes:
        after: slots of the states behind it.
    """

    def __init__(self, flow: BlockSteps, place: int, live: Sequence[_Slot], last: Mapping[_Slot, int]) -> None:
        self._flow, self._place = flow, place
        hole = flow.hole(place)
        self._hole: _Slot | None = None if hole is None else ("hole", hole)
        made: _Slot = ("value", flow.value(place))
        self._decided = live.index(self._hole) if self._hole in live else None
        kept = [slot for slot in live if last.get(slot, -1) > place]
        new = [
            slot for slot in (self._hole, made) if slot is not None and slot not in live and last.get(slot, -1) > place
        ]
        self.after = [*kept, *new]
        self._kept = [live.index(slot) for slot in kept]
        self._keeps_hole, self._keeps_made = self._hole in new, made in new
        self._reads = [live.index(("value", value)) for value in flow.steps[place].reads]
        self._rules = flow.rules(place)
        self._made: dict[tuple[int, tuple[Held | int, ...]], Made | None] = {}

    def taken(self, state: _State) -> Iterator[tuple[_State, _Items]]:
        """The states that follow on one, each with what is done."""
        reads = tuple(state[index] for index in self._reads)
        kept = tuple(state[index] for index in self._kept)
        labels = range(len(self._rules)) if self._decided is None else (state[self._decided],)
        for label in labels:
            assert isinstance(label, int)
            made = self._of(label, reads)
            if made is not None:
                held, items = made
                new = (*((label,) if self._keeps_hole else ()), *((held,) if self._keeps_made else ()))
                yield (*kept, *new), items

    def _of(self, label: int, reads: tuple[Held | int, ...]) -> Made | None:
        key = label, reads
        if key not in self._made:
            taken = [held for held in reads if isinstance(held, Held)]
            self._made[key] = self._flow.made(self._place, self._rules[label], taken)
        return self._made[key]


def _note(known: list[_Items], items: _Items) -> None:
    """Add what may be done to other ways, unless one of these does no more; those that do more are taken out."""
    own = Counter(items)
    if not any(Counter(other) <= own for other in known):
        known[:] = [other for other in known if not own <= Counter(other)]
        known.append(items)


def _merged(layers: Sequence[_Edges]) -> list[_Edges]:
    """The layers without states from which nothing follows, and with those as one from which the same does."""
    found: list[_Edges] = []
    same: dict[int, int] = {0: 0}
    for edges in reversed(layers):
        leaving: defaultdict[int, dict[int, list[_Items]]] = defaultdict(dict)
        for (source, target), ways in edges.items():
            if target in same:
                for items in ways:
                    _note(leaving[source].setdefault(same[target], []), items)
        alike: dict[object, int] = {}
        merged: _Edges = {}
        before: dict[int, int] = {}
        for source, targets in leaving.items():
            key = frozenset((target, tuple(sorted(map(repr, ways)))) for target, ways in targets.items())
            number = alike.setdefault(key, len(alike))
            before[source] = number
            merged |= {(number, target): ways for target, ways in targets.items()}
        found.append(merged)
        same = before
    return found[::-1]


def _numbered(layers: Sequence[_Edges], results: frozenset[Held]) -> StyleGraph:
    numbers: dict[_Items, int] = {}
    steps = tuple(
        tuple(
            Edge(source, target, numbers.setdefault(items, len(numbers)))
            for (source, target), ways in edges.items()
            for items in ways
        )
        for edges in layers
    )
    return StyleGraph(steps, tuple(numbers), results)
