"""Initial candidates of a search, and the neighbours of a good one.

Bounds exclude what is not better; they say little of where good candidates are. A search over many choices therefore
starts at those that a person would try first, and at candidates that differ from the incumbent in one choice, or in two
that are decided together, before it continues best bound first.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

from legoai.cost.search.candidate_bounds.bounds import Bounds
from legoai.cost.search.candidates import Choices, order_of
from legoai.cost.search.state import SearchState
from legoai.dsl.holes import OpenHole
from legoai.dsl.open_plan import Candidate
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.fsdp import Fsdp, Unit
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.offload import Offload
from legoai.specs.directives.pipeline import Pipeline

_DEGREES: Final = (Mesh, Batch)
_MEMORY: Final = (Checkpoint, Fsdp, Unit, Offload)
"""What decides memory beside degrees."""
_MOST_FIRST: Final = 16
"""Answers for degrees and micro batch that are looked at, until one may fit."""


class Neighbours:
    """Candidates of one plan.

    Args:
        state: of the search.
    """

    def __init__(self, state: SearchState) -> None:
        self._state = state

    def first(self) -> Iterator[list[Choices]]:
        """What to try first: least `pp · cp · tp`, then the largest micro batch; all else of least time, or memory.

        What lint or a bound of its memory excludes is left out.
        """
        for way in itertools.islice(self._degrees(), _MOST_FIRST):
            found = [self._completed(way, self._time), self.smallest(way)]
            yield list(dict.fromkeys(item for item in found if item is not None))

    def beside(self, choices: Choices) -> Iterator[Choices]:
        """Answers that lint allows and that differ in one hole, or in two of those that are decided together.

        These are degrees and schedule, and each of them with what decides memory. Styles are open.
        """
        holes = self._state.plan.holes
        choices = self._state.unstyled(choices)
        moves = [
            {index: value} for index, hole in enumerate(holes) if hole.line is None for value in range(hole.listed)
        ]
        shapes = [index for index, hole in enumerate(holes) if hole.owner in (*_DEGREES, Pipeline)]
        memory = [index for index, hole in enumerate(holes) if hole.owner in _MEMORY and hole.line is None]
        pairs = itertools.chain(
            itertools.combinations(shapes, 2), itertools.product(shapes, memory), itertools.combinations(memory, 2)
        )
        for pair in pairs:
            near = [list(self._near(holes[index], choices[index])) for index in pair]
            moves += [dict(zip(pair, values, strict=True)) for values in itertools.product(*near)]
        seen = {choices}
        for move in moves:
            other = tuple(move.get(index, value) for index, value in enumerate(choices))
            candidate = self._state.candidate(other)
            if not candidate.errors:
                other = self._without_idle(other, candidate)
            if other not in seen and not candidate.errors and candidate.analysis is not None:
                yield other
            seen.add(other)

    def _near(self, hole: OpenHole, value: int | None) -> Iterator[int]:
        """Other values of a hole: the next ones of a degree, all of others."""
        for other in range(hole.listed):
            if other != value and (hole.owner not in _DEGREES or value is None or abs(other - value) == 1):
                yield other

    def _without_idle(self, choices: Choices, candidate: Candidate) -> Choices:
        """The same answers, with the first value of each hole that means nothing beside the others."""
        if not candidate.plan.idle:
            return choices
        holes = zip(choices, self._state.plan.holes, strict=True)
        return tuple(0 if hole.owner is Pipeline else value for value, hole in holes)

    def _degrees(self) -> Iterator[Choices]:
        """Answers for degrees and micro batch that lint allows, the other holes left open, in the order of `first`."""
        holes = self._state.plan.holes
        order = [index for index in order_of(holes) if holes[index].owner in _DEGREES]
        nothing: Choices = (None,) * len(holes)
        heap: list[tuple[tuple[float, ...], tuple[int, ...], Choices, int]] = [((), (), nothing, 0)]
        while heap:
            _, _, way, answered = heapq.heappop(heap)
            if answered == len(order):
                yield way
                continue
            for value in range(holes[order[answered]].listed):
                other = _with(way, order[answered], value)
                if self._allowed(other) and (place := self._place(other)) is not None:
                    key = tuple(-1 if index is None else index for index in other)
                    heapq.heappush(heap, (place, key, other, answered + 1))

    def _place(self, way: Choices) -> tuple[float, ...] | None:
        """The place of a way in the order, or of the first that may become of it; None where its plan says nothing."""
        plan = self._state.candidate(way).plan

        def known(value: Callable[[], int], least: float) -> float:
            try:
                return 1 * value()  # what is not decided cannot be multiplied
            except Undecided:
                return least

        try:
            mesh, batch = plan.mesh, plan.batch
        except Undecided:
            return None
        pp, cp, tp, replicas = (
            known(functools.partial(mesh.size, axis), 1) for axis in ("pp", "cp", "tp", "dp_replicate")
        )
        return pp * cp * tp, pp, cp, -known(lambda: batch.micro_batch, math.inf), replicas

    def smallest(self, way: Choices) -> Choices | None:
        """The way with answers that may take least memory; None where lint or a bound excludes all."""
        return self._completed(way, self._memory)

    def _completed(self, way: Choices, least: Callable[[Bounds], tuple[float, ...]]) -> Choices | None:
        """The way with an answer for each open hole, one after the other the first of those whose bounds are least.

        Styles are left open: a program chooses them together.
        """
        for index, value in enumerate(way):
            if value is not None or self._state.plan.holes[index].line is not None:
                continue
            found = []
            for one in range(self._state.plan.holes[index].listed):
                other = _with(way, index, one)
                candidate = self._state.candidate(other)
                if not candidate.errors and candidate.analysis is not None:
                    if self._state.bounded(other) is None:
                        continue
                    found.append((*least(self._state.bounds(candidate.analysis)), one))
            if not found:
                return None
            way = _with(way, index, int(min(found)[-1]))
        candidate = self._state.candidate(way)
        return self._without_idle(way, candidate)

    @staticmethod
    def _time(bounds: Bounds) -> tuple[float, ...]:
        return (bounds.step_time,)

    @staticmethod
    def _memory(bounds: Bounds) -> tuple[float, ...]:
        """Of several that take as little, the slowest counts, since what recomputes most takes least."""
        return bounds.memory, -bounds.step_time

    def _allowed(self, choices: Choices) -> bool:
        candidate = self._state.candidate(choices)
        return not candidate.errors and candidate.analysis is not None


def _with(choices: Choices, index: int, value: int) -> Choices:
    return (*choices[:index], value, *choices[index + 1 :])
