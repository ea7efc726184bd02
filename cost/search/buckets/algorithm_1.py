"""Algorithm 1 of SimpleFSDP: buckets that grow for as long as the overlapped computation hides their communication.

In the order of each pass, the next unit joins the bucket whose all-gather is in flight if two conditions hold. The
all-gather, in backward together with the preceding reduce-scatter, takes no longer than the computation that it
overlaps; and the bucket fits in memory (Zhang et al. 2024, section 3.3.2). There forward and backward have buckets of
their own. Here units share their collectives in both passes, so the buckets of either pass are used for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from legoai.cost.search.buckets.problem import BucketProblem, Span


def algorithm_1(problem: BucketProblem) -> tuple[int, ...]:
    """Number of units of each bucket: the better result of the two passes; one that fits, if any does."""
    tried = [of_forward(problem)]
    if problem.gather_again(problem.units[0].size):
        tried.append(of_backward(problem))
    return min(tried, key=lambda counts: (not problem.fits(counts), problem.added(counts)))


def of_forward(problem: BucketProblem) -> tuple[int, ...]:
    """Number of units of each bucket, decided in the order of forward."""
    count = len(problem.units)
    edges = [0]
    computing: Span | None = None
    while edges[-1] < count:
        first = edges[-1]
        last = first + 1
        while last < count and _is_hidden_in_forward(problem, computing, problem.span(first, last + 1)):
            last += 1
        computing = problem.span(first, last)
        edges.append(last)
    return _counts(edges)


def of_backward(problem: BucketProblem) -> tuple[int, ...]:
    """Number of units of each bucket, decided in the order of backward."""
    edges = [len(problem.units)]
    computing: Span | None = None
    following: Span | None = None
    while edges[-1] > 0:
        last = edges[-1]
        first = last - 1
        while first > 0 and _is_hidden_in_backward(problem, following, computing, problem.span(first - 1, last)):
            first -= 1
        following, computing = computing, problem.span(first, last)
        edges.append(first)
    return _counts(edges[::-1])


def _is_hidden_in_forward(problem: BucketProblem, computing: Span | None, gathered: Span) -> bool:
    if not problem.overlaps:
        return False
    if computing is None:
        return problem.gather(gathered.size) <= problem.before.forward.seconds and problem.fits_at_ends(gathered, None)
    forward, _ = problem.bytes(computing.size, 0, gathered.size)
    return problem.gather(gathered.size) <= computing.forward.seconds and forward <= computing.forward_room


def _is_hidden_in_backward(
    problem: BucketProblem, following: Span | None, computing: Span | None, gathered: Span
) -> bool:
    if not problem.overlaps:
        return False
    again = problem.gather_again(gathered.size)
    if computing is None:
        return again <= problem.after.backward.seconds and problem.fits_at_ends(None, gathered)
    reduced = problem.after.reduce if following is None else problem.reduce(following.size)
    _, backward = problem.bytes(computing.size, gathered.size, 0 if following is None else following.size)
    return reduced + again <= computing.backward.seconds and backward <= computing.backward_room


def _counts(edges: Sequence[int]) -> tuple[int, ...]:
    return tuple(last - first for first, last in pairwise(edges))
