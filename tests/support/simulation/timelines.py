"""Busy times and exposed communication of a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from legoai.cost.timing.intervals import Intervals, SegmentIntervals, exposed_seconds, spans
from legoai.cost.timing.timeline import Interval, Resource


def busy(intervals: Sequence[Interval], resources: Sequence[Resource]) -> list[tuple[float, float]]:
    """Return the times at which any of the resources is busy, without overlap, in order."""
    starts, ends = spans(intervals, resources)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def exposed(intervals: Sequence[Interval]) -> Iterator[tuple[Interval, float]]:
    """Yield each collective, with its seconds without computation beside it."""
    found = Intervals([(0.0, SegmentIntervals(tuple(intervals)))])
    for (_, segment), seconds in zip(found.segments, exposed_seconds(found), strict=True):
        for place, alone in zip(segment.collectives.tolist(), seconds.tolist(), strict=True):
            yield segment.intervals[place], alone
