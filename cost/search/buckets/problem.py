"""Buckets of consecutive units, and the time that their communication adds to a micro batch.

Collectives of buckets run on one stream, overlapped with computation. In forward, the all-gather of the next bucket
starts with the computation of bucket `k`; in backward, the reduction of the next bucket, and then the all-gather of the
previous one:

    forward     compute k  |  gather k + 1
    backward    compute k  |  reduce k + 1, gather k - 1

The next computation waits for these collectives. So each computation is a window. Communication is exposed where it
takes longer than the window, and slows down the computation that it overlaps: first the copies of the bucket's
parameters out of its buffer, and then the units one after another. The computations before the first and after the last
unit are windows too. If nothing is reordered, each collective is waited for when it is issued, and is fully exposed.
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
"""Seconds of a collective as a function of the number of parameters."""


@dataclass(frozen=True, slots=True)
class Work:
    """Computation in one pass, as intervals of (seconds alone, seconds when overlapped by a collective).

    Attributes:
        copies: copies of parameters out of the all-gather's buffer, which come first.
        kernels: the intervals after them, in order.
    """

    copies: tuple[float, float] = (0.0, 0.0)
    kernels: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def of(seconds: float, slowdown: float = 1.0) -> Work:
        """Work of one interval, with a slowdown when overlapped by a collective."""
        return Work(kernels=((seconds, slowdown * seconds),))

    @property
    def seconds(self) -> float:
        """Seconds of all of it alone."""
        return self.copies[0] + sum(alone for alone, _ in self.kernels)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that may share its collectives.

    Attributes:
        forward: its forward of a micro batch.
        backward: its backward of a micro batch, with recomputation.
        size: number of parameters.
        forward_room: memory limit for buckets while it computes in forward, in bytes.
        backward_room: memory limit for buckets while it computes in backward, in bytes.
    """

    forward: Work
    backward: Work
    size: int
    forward_room: float = math.inf
    backward_room: float = math.inf


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Computation before the first unit, or after the last.

    Attributes:
        forward: its forward of a micro batch.
        backward: its backward of a micro batch, with recomputation.
        gather: seconds of its own all-gather in forward.
        gather_again: seconds of its own all-gather in backward.
        reduce: seconds of the reduction of its gradients.
        forward_room: memory limit for buckets while it computes in forward, in bytes.
        backward_room: memory limit for buckets while it computes in backward, in bytes.
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
    """Cumulative seconds of consecutive works, alone and when overlapped by a collective.

    Attributes:
        beside: overlapped seconds up to the end of each interval.
        alone: seconds alone up to the end of each interval.
        starts: overlapped seconds before each work, and at the end of the last.
    """

    beside: Sequence[float]
    alone: Sequence[float]
    starts: Sequence[float]

    @staticmethod
    def of(works: Sequence[Work]) -> Curve:
        """The curve of consecutive works."""
        kernels = [kernel for work in works for kernel in work.kernels]
        starts = accumulate((sum(beside for _, beside in work.kernels) for work in works), initial=0.0)
        return Curve(
            [0.0, *accumulate(beside for _, beside in kernels)],
            [0.0, *accumulate(alone for alone, _ in kernels)],
            list(starts),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A computation that communication overlaps.

    Attributes:
        copies: as for :class:`Work`.
        curve: a curve that includes the intervals after the copies.
        start: position on the curve where these begin, in overlapped seconds.
        end: position on the curve where they end.
        seconds: seconds of all of it alone.
    """

    copies: tuple[float, float]
    curve: Curve
    start: float
    end: float
    seconds: float

    @staticmethod
    def of(work: Work) -> Window:
        """The window of one work."""
        curve = Curve.of([work])
        return Window(work.copies, curve, 0.0, curve.starts[-1], work.seconds)

    def done(self, communication: Times) -> Times:
        """Computation that is done during some seconds of communication, in seconds alone."""
        alone, beside = self.copies
        copying = np.minimum(communication, beside)
        until = np.minimum(self.start + communication - copying, self.end)
        curve = self.curve
        done = np.interp(until, curve.beside, curve.alone) - np.interp(self.start, curve.beside, curve.alone)
        return done + (copying * (alone / beside) if beside else 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive units as one bucket: their computation, their parameters, and the least memory limit among them."""

    forward: Window
    backward: Window
    size: int
    forward_room: float
    backward_room: float


@dataclass(frozen=True, kw_only=True)
class BucketProblem:
    """Partition of consecutive units into buckets.

    Attributes:
        units: the units, in the order of forward.
        before: the computation before the first unit.
        after: the computation after the last unit.
        gather: seconds of an all-gather in forward.
        gather_again: seconds of an all-gather in backward; 0 where parameters stay unsharded.
        reduce: seconds of a reduction.
        gathered_bytes: bytes per unsharded parameter, and per unsharded gradient.
        reduced_bytes: bytes per parameter in the buffer of a reduction.
        overlaps: whether computation and collectives overlap.
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
        """Seconds that communication adds to the computation that it overlaps."""
        return communication - computation.done(communication) if self.overlaps else communication

    def added(self, counts: Sequence[int]) -> float:
        """Seconds that the communication of a bucketing adds to a micro batch."""
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
        """Seconds added before the first bucket's forward and after its backward."""
        forward, backward, _ = self._ends
        return float(self.window(self.gather(first.size), forward) + self.window(self.reduce(first.size), backward))

    def beside(self, span: Span, gathered: Times, reduced: Times) -> Times:
        """Seconds added to the computation of a bucket.

        Args:
            span: the bucket.
            gathered: seconds of the all-gather that overlaps its forward.
            reduced: seconds of the reduction and the all-gather that overlap its backward.
        """
        return self.window(gathered, span.forward) + self.window(reduced, span.backward)

    def end(self, last: Span) -> float:
        """Seconds added before the last bucket's backward."""
        return float(self.window(self.gather_again(last.size), self._ends[2]))

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether a bucketing fits at every moment."""
        spans = self.spans(counts)
        return self.fits_at_ends(spans[0], spans[-1]) and all(
            self.has_room(span, 0 if previous is None else previous.size, 0 if following is None else following.size)
            for previous, span, following in _with_neighbours(spans)
        )

    def fits_at_ends(self, first: Span | None, last: Span | None) -> bool:
        """Whether the buffers of collectives that overlap the neighbours' computation fit there."""
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
            previous: parameters of the previous bucket.
            following: parameters of the next bucket.
        """
        forward, backward = self.bytes(span.size, previous, following)
        return (forward <= span.forward_room) & (backward <= span.backward_room)

    def bytes(self, size: int, previous: int, following: Sizes) -> tuple[Times, Times]:
        """Bytes of buckets while one computes: in forward, and at the end of its backward.

        In forward these are its unsharded parameters and those of the next bucket. In backward these are its unsharded
        parameters and gradients, the buffer of their reduction, the previous bucket's unsharded parameters, and the
        buffer of the next bucket's reduction.
        """
        if not self.overlaps:
            previous, following = 0, 0 * following
        forward = self.gathered_bytes * (size + following)
        backward = self.gathered_bytes * (2 * size + previous) + self.reduced_bytes * (size + following)
        return forward, backward

    def spans(self, counts: Sequence[int]) -> list[Span]:
        """The buckets of a bucketing."""
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
        """Prefix sums over the units: of parameters, and of seconds of copies and of all work, in both passes."""
        works = [
            [*unit.forward.copies, unit.forward.seconds, *unit.backward.copies, unit.backward.seconds]
            for unit in self.units
        ]
        sizes = [0, *accumulate(unit.size for unit in self.units)]
        return sizes, np.concatenate([np.zeros((1, 6)), np.cumsum(works, axis=0)])

    @functools.cached_property
    def _curves(self) -> tuple[Curve, Curve]:
        """The curves of forward, and of backward, which begins with the last unit."""
        forward = Curve.of([unit.forward for unit in self.units])
        return forward, Curve.of([unit.backward for unit in reversed(self.units)])

    @functools.cached_property
    def _ends(self) -> tuple[Window, Window, Window]:
        before, after = self.before, self.after
        return Window.of(before.forward), Window.of(before.backward), Window.of(after.backward)


def _with_neighbours(spans: Sequence[Span]) -> Iterator[tuple[Span | None, Span, Span | None]]:
    for index, span in enumerate(spans):
        yield spans[index - 1] if index else None, span, spans[index + 1] if index + 1 < len(spans) else None
