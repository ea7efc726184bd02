"""Solved bucketings of a simulated candidate, by Algorithm 1 and by the dynamic programme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from legoai.cost.machine.cluster import Machine
from legoai.cost.search.buckets.algorithm_1 import algorithm_1
from legoai.cost.search.buckets.costs import UnitWork, problems_of
from legoai.cost.search.buckets.exact import least_added
from legoai.cost.search.stages.costs import Room
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.specs.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """Buckets of consecutive units.

    Attributes:
        counts: number of units of each bucket.
        added: predicted seconds that their communication adds to a step, exposed or by slowing computation down.
        fits: whether they are predicted to fit.
    """

    counts: tuple[int, ...]
    added: float
    fits: bool

    @property
    def text(self) -> str:
        """The treatment as a plan writes it."""
        return bucket_of(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketings:
    """Solved bucketings of one rule.

    Attributes:
        span: span of the rule.
        algorithm_1: the better of the results of SimpleFSDP's algorithm in forward and in backward.
        least: the bucketing that fits and adds least; None where none fits.
    """

    span: Span
    algorithm_1: Bucketing
    least: Bucketing | None

    def texts(self) -> list[str]:
        """The treatments as a plan writes them, the best first."""
        found = [item.text for item in (self.least, self.algorithm_1) if item is not None]
        return list(dict.fromkeys(found))


def bucket_of(counts: Sequence[int]) -> str:
    """The treatment of buckets with these numbers of units, as a plan writes it."""
    if len(counts) == 1:
        return "bucket(group)"
    if max(counts) == 1:
        return "bucket(module)"
    return f"bucket([{', '.join(map(str, counts))}])"


def bucketings(analysis: Analysis, work: UnitWork, machine: Machine, room: Room) -> Iterator[Bucketings]:
    """Yield the solved bucketings of each rule of `comm` of a simulated candidate.

    Args:
        analysis: analysis of the candidate.
        work: observed work of its units.
        machine: the machine that it runs on.
        room: memory limits of a rank.
    """
    limit = min(room.active, room.reserved - work.unused, room.device - work.beyond)
    batches = micro_batches(analysis.plan) or 1
    for span, problem in problems_of(analysis, work, machine, limit):
        greedy, least = algorithm_1(problem), least_added(problem)
        first, second = (
            None
            if counts is None
            else Bucketing(counts=counts, added=batches * problem.added(counts), fits=problem.fits(counts))
            for counts in (greedy, least)
        )
        assert first is not None
        yield Bucketings(span=span, algorithm_1=first, least=second)
