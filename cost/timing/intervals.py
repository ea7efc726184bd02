"""Intervals of a timeline, in which repeated segments are stored once.

The ops of a pipeline action run in the same way every time. :class:`SegmentIntervals` holds their times once, from the
beginning of the action; :class:`Intervals` concatenates segments. Sums process each segment once; iteration yields
every op in order of its beginning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args, overload

import numpy as np
from numpy.typing import NDArray

from legoai.cost.timing.timeline import Interval, Resource, Timed
from legoai.cost.trace.records import Collective
from legoai.cost.trace.translation import Translation

Floats: TypeAlias = NDArray[np.float64]
RESOURCES: Final[tuple[Resource, ...]] = get_args(Resource)
_PLACE: Final = {resource: place for place, resource in enumerate(RESOURCES)}


@dataclass(frozen=True, eq=False)
class SegmentIntervals:
    """Operations that run in the same way every time; times are in seconds from the beginning of the segment.

    Attributes:
        intervals: the operations.
        named: whether their names are final, and not translated.
    """

    intervals: tuple[Interval, ...]
    named: bool = False

    @functools.cached_property
    def starts(self) -> Floats:
        """When each begins."""
        return np.array([item.start for item in self.intervals], dtype=np.float64)

    @functools.cached_property
    def ends(self) -> Floats:
        """When each ends."""
        return np.array([item.end for item in self.intervals], dtype=np.float64)

    @functools.cached_property
    def resources(self) -> NDArray[np.int8]:
        """The resource of each interval, as an index in `RESOURCES`."""
        return np.array([_PLACE[item.cost.resource] for item in self.intervals], dtype=np.int8)

    @functools.cached_property
    def collectives(self) -> NDArray[np.intp]:
        """The indices of the collectives."""
        return np.array([i for i, item in enumerate(self.intervals) if isinstance(item.record, Collective)], np.intp)

    @functools.cached_property
    def _times(self) -> dict[tuple[Resource, ...], tuple[Floats, Floats]]:
        return {}

    def times(self, resources: tuple[Resource, ...]) -> tuple[Floats, Floats]:
        """Begin and end times of the intervals on some resources."""
        found = self._times.get(resources)
        if found is None:
            chosen = np.isin(self.resources, [_PLACE[name] for name in resources])
            found = self._times[resources] = self.starts[chosen], self.ends[chosen]
        return found


class Intervals(Sequence[Interval]):
    """The operations of a rank, in the order in which they begin.

    Attributes:
        segments: each with the time at which it begins, in seconds.
        translation: from the names in the segments to those of the rank; None where they are the same.
    """

    def __init__(
        self, segments: Iterable[tuple[float, SegmentIntervals]], translation: Translation | None = None
    ) -> None:
        self.segments = tuple((at, segment) for at, segment in segments if segment.intervals)
        self.translation = translation

    @classmethod
    def of(cls, intervals: Sequence[Interval]) -> Intervals:
        """Return intervals as one segment, unless they consist of segments already."""
        return intervals if isinstance(intervals, Intervals) else cls([(0.0, SegmentIntervals(tuple(intervals)))])

    @functools.cached_property
    def _whole(self) -> tuple[Interval, ...]:
        found = [
            Interval(
                item.record if segment.named else self.meant(item.record),
                item.cost,
                item.queue,
                item.start + at,
                item.end + at,
            )
            for at, segment in self.segments
            for item in segment.intervals
        ]
        return tuple(sorted(found, key=lambda item: (item.start, item.end)))

    def meant(self, record: Timed) -> Timed:
        """Return a record of the segments with the names of the rank."""
        return record if self.translation is None else self.translation.record(record)  # type: ignore[return-value]

    def path(self, path: str) -> str:
        """Return the module that a path in the segments denotes."""
        return path if self.translation is None else self.translation.path(path)

    def __len__(self) -> int:
        return sum(len(segment.intervals) for _, segment in self.segments)

    def __iter__(self) -> Iterator[Interval]:
        return iter(self._whole)

    @overload
    def __getitem__(self, index: int) -> Interval: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Interval, ...]: ...
    def __getitem__(self, index: int | slice) -> Interval | tuple[Interval, ...]:
        return self._whole[index]

    @property
    def end(self) -> float:
        """The end of the last interval; 0 where there are none."""
        return max((at + float(segment.ends.max()) for at, segment in self.segments), default=0.0)

    def times(self, resources: Sequence[Resource]) -> tuple[Floats, Floats]:
        """Return begin and end times of the intervals on some resources, in no order."""
        starts, ends, asked = [np.empty(0)], [np.empty(0)], tuple(resources)
        for at, segment in self.segments:
            begins, stops = segment.times(asked)
            starts.append(begins + at)
            ends.append(stops + at)
        return np.concatenate(starts), np.concatenate(ends)


def spans(intervals: Sequence[Interval], resources: Sequence[Resource]) -> tuple[Floats, Floats]:
    """Return the begins and ends of the times at which any of the resources is busy, without overlap, in order."""
    starts, ends = Intervals.of(intervals).times(resources)
    order = np.argsort(starts, kind="stable")
    starts, latest = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = starts[1:] > latest[:-1]
    return starts[begins], latest[np.append(begins[1:], True)] if len(starts) else latest


def seconds_busy(intervals: Sequence[Interval], resources: Sequence[Resource]) -> float:
    """Return the seconds for which any of the resources is busy."""
    starts, ends = spans(intervals, resources)
    return float((ends - starts).sum())


def busy_until(intervals: Sequence[Interval], resources: Sequence[Resource]) -> Callable[[Floats], Floats]:
    """Return a function of points in time: the seconds before each for which any of the resources is busy."""
    begins, stops = spans(intervals, resources)
    before = np.concatenate([[0.0], np.cumsum(stops - begins)])

    def seconds(until: Floats) -> Floats:
        place = np.searchsorted(begins, until, side="right")
        inside = np.maximum(stops[place - 1] - until, 0.0) if len(stops) else np.zeros(len(until))
        return np.where(place > 0, before[place] - inside, 0.0)

    return seconds


def exposed_seconds(intervals: Intervals) -> list[Floats]:
    """Return, for each segment, the exposed seconds of each of its collectives: those without computation beside it.

    Where two collectives run at once and nothing computes, the time belongs to the one that began first.
    """
    sizes = [len(segment.collectives) for _, segment in intervals.segments]
    starts = _joined([segment.starts[segment.collectives] + at for at, segment in intervals.segments])
    ends = _joined([segment.ends[segment.collectives] + at for at, segment in intervals.segments])
    order = np.lexsort((ends, starts))
    starts, ends = starts[order], ends[order]
    if len(ends):
        starts[1:] = np.maximum(starts[1:], np.maximum.accumulate(ends)[:-1])
    computed = busy_until(intervals, ("compute",))
    alone = np.empty(len(starts))
    alone[order] = np.maximum(0.0, ends - starts - np.maximum(0.0, computed(ends) - computed(starts)))
    return np.split(alone, np.cumsum(sizes)[:-1]) if sizes else []


def _joined(parts: Sequence[Any]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0)


def since(intervals: Sequence[Interval], begin: float, translation: Translation | None = None) -> Intervals:
    """Return the intervals that begin at a time or later, in seconds from that time.

    Args:
        intervals: of a rank.
        begin: the time.
        translation: from the names in them to those of the rank.
    """
    if not begin and isinstance(intervals, Intervals):
        return Intervals(intervals.segments, translation)
    found = (
        Interval(item.record, item.cost, item.queue, item.start - begin, item.end - begin)
        for item in intervals
        if item.start >= begin
    )
    return Intervals([(0.0, SegmentIntervals(tuple(found)))], translation)
