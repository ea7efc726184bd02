"""Exact dynamic programme over contiguous buckets: the bucketing whose communication adds the least time.

The time that a bucket adds depends on the previous bucket, whose all-gather in backward overlaps its computation, and
on the next bucket. So a state is the last bucket, `(first, last)`, with the seconds of the previous bucket's all-gather
and its size. Among states with the same last bucket dominated ones are dropped, and so are all states that add at
least as much as a known bucketing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from legoai.cost.search.buckets.algorithm_1 import algorithm_1
from legoai.cost.search.buckets.problem import BucketProblem, Span

Floats: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.intp]


class _Label(NamedTuple):
    """Partial bucketing that ends with the last bucket of a state.

    Attributes:
        added: seconds that communication adds to all windows that do not depend on later buckets.
        again: seconds of the previous bucket's all-gather in backward.
        size: parameters of the previous bucket.
        first: first unit of the last bucket.
        before: the partial bucketing that ends with the previous bucket.
    """

    added: float
    again: float
    size: int
    first: int
    before: _Label | None


def least_added(problem: BucketProblem) -> tuple[int, ...] | None:
    """Number of units of each bucket; None where no bucketing fits."""
    count = len(problem.units)
    known = [counts for counts in _known(problem) if problem.fits(counts)]
    best = min(known, key=problem.added, default=None)
    least = math.inf if best is None else problem.added(best)
    states: list[dict[int, list[_Label]]] = [{} for _ in range(count + 1)]
    """Partial bucketings, by the end of the last bucket and then by its first unit."""
    for last in range(1, count + 1):
        span = problem.span(0, last)
        if problem.fits_at_ends(span, None) and (added := problem.begin(span)) < least:
            states[last][0] = [_Label(added, problem.before.gather_again, 0, 0, None)]
    for last in range(1, count):
        following = _NextBuckets(problem, last)
        for first, labels in states[last].items():
            span = problem.span(first, last)
            again = problem.gather_again(span.size)
            reached, chosen = _best(problem, span, following, labels)
            for place in np.flatnonzero(reached < least).tolist():
                label = _Label(float(reached[place]), again, span.size, last, labels[int(chosen[place])])
                states[last + 1 + place].setdefault(last, []).append(label)
        for end in range(last + 1, count + 1):
            if last in states[end]:
                states[end][last] = _undominated(states[end][last])
    nothing = _NextBuckets(problem, count)
    for first, labels in states[count].items():
        span = problem.span(first, count)
        [reached], [place] = _best(problem, span, nothing, labels)
        whole = float(reached + problem.end(span))
        if problem.fits_at_ends(None, span) and whole < least:
            least, best = whole, _counts(labels[int(place)], count)
    return best


class _NextBuckets:
    """Buckets that may start at `first`, by their ends; after the last unit, the neighbour after all buckets."""

    def __init__(self, problem: BucketProblem, first: int) -> None:
        sizes = [problem.span(first, last).size for last in range(first + 1, len(problem.units) + 1)]
        self.sizes = np.array(sizes or [0])
        self.gather = np.array([problem.gather(size) for size in sizes] or [problem.after.gather])
        self.reduce = np.array([problem.reduce(size) for size in sizes] or [problem.after.reduce])


def _best(
    problem: BucketProblem, span: Span, following: _NextBuckets, labels: Sequence[_Label]
) -> tuple[Floats, Places]:
    """For each next bucket, the least added seconds, infinite where none fits, and the index of their label."""
    added = np.array([
        np.where(
            problem.has_room(span, label.size, following.sizes),
            label.added + problem.beside(span, following.gather, following.reduce + label.again),
            np.inf,
        )
        for label in labels
    ])  # fmt: skip
    chosen = added.argmin(axis=0)
    return added.min(axis=0), chosen


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda item: item[:3]):
        if not any(other.again <= label.again and other.size <= label.size for other in kept):
            kept.append(label)
    return kept


def _known(problem: BucketProblem) -> Iterator[tuple[int, ...]]:
    """Yield bucketings whose least time is an upper bound."""
    count = len(problem.units)
    yield algorithm_1(problem)
    for size in {1, 2, 4, 8, count}:
        if size <= count:
            whole, rest = divmod(count, size)
            yield (size,) * whole + ((rest,) if rest else ())


def _counts(label: _Label | None, end: int) -> tuple[int, ...]:
    found: list[int] = []
    while label is not None:
        found.append(end - label.first)
        end, label = label.first, label.before
    return tuple(reversed(found))
