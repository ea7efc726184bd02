"""Intervals of a timeline, in which repeated segments are stored once.

The ops of a pipeline's action run one after the other in the same way whenever the action is taken.
:class:`SegmentIntervals` has their times once, from the beginning of the action; :class:`Intervals` puts segments
behind each other. Sums look at each segment once; what needs every op gets them in the order in which they begin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
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
    """Operations that run in the same way whenever they are run; times are in seconds from its beginning.

    Attributes:
        intervals: the operations.
        named: whether their names are those that are meant, whatever else is renamed.
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
        """What each occupies, as a place in `RESOURCES`."""
        return np.array([_PLACE[item.cost.resource] for item in self.intervals], dtype=np.int8)

    @functools.cached_property
    def collectives(self) -> NDArray[np.intp]:
        """The places of those that are collectives."""
        return np.array([i for i, item in enumerate(self.intervals) if isinstance(item.record, Collective)], np.intp)

    @functools.cached_property
    def _times(self) -> dict[tuple[Resource, ...], tuple[Floats, Floats]]:
        return {}

    def times(self, resources: tuple[Resource, ...]) -> tuple[Floats, Floats]:
        """When what occupies any of the resources begins and ends."""
        found = self._times.get(resources)
        if found is None:
            chosen = np.isin(self.resources, [_PLACE[name] for name in resources])
            found = self._times[resources] = self.starts[chosen], self.ends[chosen]
        return found


class Intervals(Sequence[Interval]):
    """The operations of a rank, in the order in which they begin.

    Attributes:
        segments: what they are made of, each with the second in which it begins.
        translation: from the names in the segments to those that are meant; None where they are the same.
    """

    def __init__(
        self, segments: Iterable[tuple[float, SegmentIntervals]], translation: Translation | None = None
    ) -> None:
        self.segments = tuple((at, segment) for at, segment in segments if segment.intervals)
        self.translation = translation

    @classmethod
    def of(cls, intervals: Sequence[Interval]) -> Intervals:
        """Return intervals as one segment, unless they are made of segments already."""
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
        """Return a record of the segments with the names that are meant."""
        return record if self.translation is None else self.translation.record(record)  # type: ignore[return-value]

    def path(self, path: str) -> str:
        """Return the module that is meant by a path in the segments."""
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
        """When the last of them is over; 0 where there are none."""
        return max((at + float(segment.ends.max()) for at, segment in self.segments), default=0.0)

    def times(self, resources: Sequence[Resource]) -> tuple[Floats, Floats]:
        """When what occupies any of the resources begins and ends, in no order."""
        starts, ends, asked = [np.empty(0)], [np.empty(0)], tuple(resources)
        for at, segment in self.segments:
            begins, stops = segment.times(asked)
            starts.append(begins + at)
            ends.append(stops + at)
        return np.concatenate(starts), np.concatenate(ends)


def spans(intervals: Sequence[Interval], resources: Sequence[Resource]) -> tuple[Floats, Floats]:
    """When any of the resources is occupied: beginnings and ends of times without overlap, in order."""
    starts, ends = Intervals.of(intervals).times(resources)
    order = np.argsort(starts, kind="stable")
    starts, latest = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = starts[1:] > latest[:-1]
    return starts[begins], latest[np.append(begins[1:], True)] if len(starts) else latest


def busy(intervals: Sequence[Interval], resources: Sequence[Resource]) -> list[tuple[float, float]]:
    """The times during which any of the resources is occupied, without overlap, in order."""
    starts, ends = spans(intervals, resources)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def seconds_busy(intervals: Sequence[Interval], resources: Sequence[Resource]) -> float:
    """For how long any of the resources is occupied."""
    starts, ends = spans(intervals, resources)
    return float((ends - starts).sum())


def exposed_seconds(intervals: Intervals) -> list[Floats]:
    """For each segment, for how many seconds of each of its collectives no computation runs beside it.

    Where two collectives run at once and nothing computes, the time belongs to the one that began first.
    """
    sizes = [len(segment.collectives) for _, segment in intervals.segments]
    starts = _joined([segment.starts[segment.collectives] + at for at, segment in intervals.segments])
    ends = _joined([segment.ends[segment.collectives] + at for at, segment in intervals.segments])
    order = np.lexsort((ends, starts))
    starts, ends = starts[order], ends[order]
    if len(ends):
        starts[1:] = np.maximum(starts[1:], np.maximum.accumulate(ends)[:-1])
    begins, stops = spans(intervals, ("compute",))
    before = np.concatenate([[0.0], np.cumsum(stops - begins)])

    def computed(until: Floats) -> Floats:
        """Seconds of computation before some moments."""
        place = np.searchsorted(begins, until, side="right")
        inside = np.maximum(stops[place - 1] - until, 0.0) if len(stops) else np.zeros(len(until))
        return np.where(place > 0, before[place] - inside, 0.0)

    alone = np.empty(len(starts))
    alone[order] = np.maximum(0.0, ends - starts - np.maximum(0.0, computed(ends) - computed(starts)))
    return np.split(alone, np.cumsum(sizes)[:-1]) if sizes else []


def exposed(intervals: Sequence[Interval]) -> Iterator[tuple[Interval, float]]:
    """Each collective, and for how many of its seconds no computation ran beside it."""
    found = Intervals([(0.0, SegmentIntervals(tuple(intervals)))])
    for (_, segment), seconds in zip(found.segments, exposed_seconds(found), strict=True):
        for place, alone in zip(segment.collectives.tolist(), seconds.tolist(), strict=True):
            yield segment.intervals[place], alone


def _joined(parts: Sequence[Any]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0)


def since(intervals: Sequence[Interval], begin: float, translation: Translation | None = None) -> Intervals:
    """Return those that do not begin before a moment, in seconds from it.

    Args:
        intervals: of a rank.
        begin: the moment.
        translation: from the names in them to those that are meant.
    """
    if not begin and isinstance(intervals, Intervals):
        return Intervals(intervals.segments, translation)
    found = (
        Interval(item.record, item.cost, item.queue, item.start - begin, item.end - begin)
        for item in intervals
        if item.start >= begin
    )
    return Intervals([(0.0, SegmentIntervals(tuple(found)))], translation)
