"""Buckets of consecutive units, and what their communication adds to a micro batch.

Buckets communicate on one queue while others compute. With the computation of bucket `k` the next one's gather begins
in forward; in backward the reduction of the bucket behind it, and then the gather of the one before it:

    forward     compute k  |  gather k + 1
    backward    compute k  |  reduce k + 1, gather k - 1

The next computation waits for all of that. So each computation is a window: what is communicated beside it is exposed
as far as it takes longer, and until then slows down what computes first: the parameters of all units of the bucket are
copied out of its buffer, and then the units compute one after the other. What stands before the first unit and behind
the last has windows too. Where nothing is reordered, a collective is waited for as soon as it is issued, and all of it
is exposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Times: TypeAlias = Any
"""Seconds or bytes: a number, or an array of them."""

Sizes: TypeAlias = Any
"""Parameters: a number, or an array of them."""

Seconds: TypeAlias = Callable[[int], float]
"""Seconds of a collective of so many parameters."""


@dataclass(frozen=True, slots=True)
class Work:
    """What computes in one pass, in pieces of (seconds alone, seconds beside a collective).

    Attributes:
        copies: of parameters out of the buffer in which they were gathered, before all else.
        kernels: what follows, in its order.
    """

    copies: tuple[float, float] = (0.0, 0.0)
    kernels: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def of(seconds: float, slowdown: float = 1.0) -> Work:
        """What takes so many seconds alone, and so many times as much beside a collective."""
        return Work(kernels=((seconds, slowdown * seconds),))

    @property
    def seconds(self) -> float:
        """Of all of it alone."""
        return self.copies[0] + sum(alone for alone, _ in self.kernels)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that may share its collectives.

    Attributes:
        forward: of a micro batch.
        backward: the same of its backward, with what is recomputed.
        size: parameters.
        forward_room: bytes that buckets may take while it computes in forward.
        backward_room: the same of backward.
    """

    forward: Work
    backward: Work
    size: int
    forward_room: float = math.inf
    backward_room: float = math.inf


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What stands before the first unit, or behind the last.

    Attributes:
        forward: what it computes in forward.
        backward: the same of its backward.
        gather: seconds of its own gather in forward.
        gather_again: seconds of that in backward.
        reduce: seconds of the reduction of its gradients.
        forward_room: bytes that buckets may take while it computes in forward.
        backward_room: the same of backward.
    """

    forward: Work = Work()
    backward: Work = Work()
    gather: float = 0.0
    gather_again: float = 0.0
    reduce: float = 0.0
    forward_room: float = math.inf
    backward_room: float = math.inf


@dataclass(frozen=True)
class Curve:
    """How much of several pieces of work is done beside a collective.

    Attributes:
        beside: seconds beside a collective up to the end of each kernel.
        alone: the same of seconds alone.
        starts: of each piece, the seconds beside a collective before it; and behind the last.
    """

    beside: Sequence[float]
    alone: Sequence[float]
    starts: Sequence[float]

    @staticmethod
    def of(works: Sequence[Work]) -> Curve:
        """The curve of works, one after the other."""
        kernels = [kernel for work in works for kernel in work.kernels]
        starts = accumulate((sum(beside for _, beside in work.kernels) for work in works), initial=0.0)
        return Curve(
            [0.0, *accumulate(beside for _, beside in kernels)],
            [0.0, *accumulate(alone for alone, _ in kernels)],
            list(starts),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A computation beside which something is communicated.

    Attributes:
        copies: as of :class:`Work`.
        curve: of what follows.
        start: where it begins on the curve, in seconds beside a collective.
        end: where it ends.
        seconds: of all of it alone.
    """

    copies: tuple[float, float]
    curve: Curve
    start: float
    end: float
    seconds: float

    @staticmethod
    def of(work: Work) -> Window:
        """The window of one piece of work."""
        curve = Curve.of([work])
        return Window(work.copies, curve, 0.0, curve.starts[-1], work.seconds)

    def done(self, communication: Times) -> Times:
        """Seconds of work alone that are done beside so many seconds of communication."""
        alone, beside = self.copies
        copying = np.minimum(communication, beside)
        until = np.minimum(self.start + communication - copying, self.end)
        curve = self.curve
        done = np.interp(until, curve.beside, curve.alone) - np.interp(self.start, curve.beside, curve.alone)
        return done + (copying * (alone / beside) if beside else 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive units as one bucket: what they compute and hold together, and the least room of any."""

    forward: Window
    backward: Window
    size: int
    forward_room: float
    backward_room: float


@dataclass(frozen=True, kw_only=True)
class BucketProblem:
    """Units that are to be put into buckets.

    Attributes:
        units: in the order of forward.
        before: what computes before the first of them.
        after: what computes behind the last.
        gather: seconds of a gather in forward.
        gather_again: seconds of one in backward; 0 where nothing is gathered again.
        reduce: seconds of a reduction.
        gathered_bytes: of one gathered parameter, which its gradient takes too before it is reduced.
        reduced_bytes: of one parameter in the buffer of a reduction.
        overlaps: whether anything computes beside a collective.
    """

    units: Sequence[Unit]
    before: Neighbour = Neighbour()
    after: Neighbour = Neighbour()
    gather: Seconds
    gather_again: Seconds
    reduce: Seconds
    gathered_bytes: float = 0.0
    reduced_bytes: float = 0.0
    overlaps: bool = True

    def window(self, communication: Times, computation: Window) -> Times:
        """Seconds that communication adds to the computation beside it."""
        return communication - computation.done(communication) if self.overlaps else communication

    def added(self, counts: Sequence[int]) -> float:
        """Seconds that the communication of buckets of so many units adds to a micro batch."""
        spans = self.spans(counts)
        first, last = spans[0], spans[-1]
        total = self.begin(first) + self.end(last)
        for previous, span, following in _with_neighbours(spans):
            gather = self.after.gather if following is None else self.gather(following.size)
            reduce = self.after.reduce if following is None else self.reduce(following.size)
            again = self.before.gather_again if previous is None else self.gather_again(previous.size)
            total += self.beside(span, gather, reduce + again)
        return float(total)

    def begin(self, first: Span) -> float:
        """Seconds added before the first bucket computes in forward, and behind that in backward."""
        forward, backward, _ = self._ends
        return float(self.window(self.gather(first.size), forward) + self.window(self.reduce(first.size), backward))

    def beside(self, span: Span, gathered: Times, reduced: Times) -> Times:
        """Seconds added to the computation of a bucket.

        Args:
            span: the bucket.
            gathered: seconds of the gather beside its forward.
            reduced: seconds of the reduction and the gather beside its backward.
        """
        return self.window(gathered, span.forward) + self.window(reduced, span.backward)

    def end(self, last: Span) -> float:
        """Seconds added before the last bucket's backward."""
        return float(self.window(self.gather_again(last.size), self._ends[2]))

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether buckets of so many units fit at every moment."""
        spans = self.spans(counts)
        return self.fits_at_ends(spans[0], spans[-1]) and all(
            self.has_room(span, 0 if previous is None else previous.size, 0 if following is None else following.size)
            for previous, span, following in _with_neighbours(spans)
        )

    def fits_at_ends(self, first: Span | None, last: Span | None) -> bool:
        """Whether what is communicated beside the neighbours fits there."""
        if not self.overlaps:
            return True
        before, after = self.before, self.after
        return (
            first is None
            or (
                self.gathered_bytes * first.size <= before.forward_room
                and self.reduced_bytes * first.size <= before.backward_room
            )
        ) and (last is None or self.gathered_bytes * last.size <= after.backward_room)

    def has_room(self, span: Span, previous: int, following: Sizes) -> Any:
        """Whether a bucket fits while it computes.

        Args:
            span: the bucket.
            previous: parameters of the one before it.
            following: of the one behind it.
        """
        forward, backward = self.bytes(span.size, previous, following)
        return (forward <= span.forward_room) & (backward <= span.backward_room)

    def bytes(self, size: int, previous: int, following: Sizes) -> tuple[Times, Times]:
        """Bytes that buckets take while one computes: in forward, and at the end of its backward.

        In forward these are its parameters, and those of the next one on their way. In backward they are its parameters
        and gradients, these also in the buffer of their reduction, the parameters of the one before it, and the buffer
        of the one behind it.
        """
        if not self.overlaps:
            previous, following = 0, 0 * following
        forward = self.gathered_bytes * (size + following)
        backward = self.gathered_bytes * (2 * size + previous) + self.reduced_bytes * (size + following)
        return forward, backward

    def spans(self, counts: Sequence[int]) -> list[Span]:
        """The buckets of so many units."""
        assert sum(counts) == len(self.units), "every unit is in one bucket"
        ends = [0, *accumulate(counts)]
        return [self.span(first, last) for first, last in pairwise(ends)]

    def span(self, first: int, last: int) -> Span:
        """The bucket of the units from ``first`` to before ``last``."""
        sizes, sums = self._sums
        units, count = self.units[first:last], len(self.units)
        of = (sums[last] - sums[first]).tolist()
        forward, backward = self._curves
        return Span(
            Window((of[0], of[1]), forward, forward.starts[first], forward.starts[last], of[2]),
            Window((of[3], of[4]), backward, backward.starts[count - last], backward.starts[count - first], of[5]),
            sizes[last] - sizes[first],
            min(unit.forward_room for unit in units),
            min(unit.backward_room for unit in units),
        )

    @functools.cached_property
    def _sums(self) -> tuple[list[int], NDArray[np.float64]]:
        """Parameters before each unit, and seconds of copies and of all work, in both passes."""
        works = [
            [*unit.forward.copies, unit.forward.seconds, *unit.backward.copies, unit.backward.seconds]
            for unit in self.units
        ]
        sizes = [0, *accumulate(unit.size for unit in self.units)]
        return sizes, np.concatenate([np.zeros((1, 6)), np.cumsum(works, axis=0)])

    @functools.cached_property
    def _curves(self) -> tuple[Curve, Curve]:
        """Of forward, and of backward, which begins with the last unit."""
        forward = Curve.of([unit.forward for unit in self.units])
        return forward, Curve.of([unit.backward for unit in reversed(self.units)])

    @functools.cached_property
    def _ends(self) -> tuple[Window, Window, Window]:
        before, after = self.before, self.after
        return Window.of(before.forward), Window.of(before.backward), Window.of(after.backward)


def _with_neighbours(spans: Sequence[Span]) -> Iterator[tuple[Span | None, Span, Span | None]]:
    for index, span in enumerate(spans):
        yield spans[index - 1] if index else None, span, spans[index + 1] if index + 1 < len(spans) else None
