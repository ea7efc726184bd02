"""When is a device busy, and with what, if most of what it does is done over and over?

The operations of an action of a pipeline run one after the other in the same way whenever the action is taken. A
:class:`Stretch` has their times once, from its own beginning; :class:`Intervals` puts stretches behind each other. What
adds up looks at each stretch once; what needs every operation gets them in the order in which they begin.
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
from legoai.cost.trace.translation import Renaming

Floats: TypeAlias = NDArray[np.float64]
RESOURCES: Final[tuple[Resource, ...]] = get_args(Resource)
_PLACE: Final = {resource: place for place, resource in enumerate(RESOURCES)}


@dataclass(frozen=True, eq=False)
class Stretch:
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


class Intervals(Sequence[Interval]):
    """The operations of a rank, in the order in which they begin.

    Attributes:
        stretches: what they are made of, each with the second in which it begins.
        renaming: from the names in the stretches to those that are meant; None where they are the same.
    """

    def __init__(self, stretches: Iterable[tuple[float, Stretch]], renaming: Renaming | None = None) -> None:
        self.stretches = tuple((at, stretch) for at, stretch in stretches if stretch.intervals)
        self.renaming = renaming

    @classmethod
    def of(cls, intervals: Sequence[Interval]) -> Intervals:
        """Return intervals as one stretch, unless they are made of stretches already."""
        return intervals if isinstance(intervals, Intervals) else cls([(0.0, Stretch(tuple(intervals)))])

    @functools.cached_property
    def _whole(self) -> tuple[Interval, ...]:
        found = [
            Interval(
                item.record if stretch.named else self.meant(item.record),
                item.cost,
                item.queue,
                item.start + at,
                item.end + at,
            )
            for at, stretch in self.stretches
            for item in stretch.intervals
        ]
        return tuple(sorted(found, key=lambda item: (item.start, item.end)))

    def meant(self, record: Timed) -> Timed:
        """Return a record of the stretches with the names that are meant."""
        return record if self.renaming is None else self.renaming.record(record)  # type: ignore[return-value]

    def path(self, path: str) -> str:
        """Return the module that is meant by a path in the stretches."""
        return path if self.renaming is None else self.renaming.path(path)

    def __len__(self) -> int:
        return sum(len(stretch.intervals) for _, stretch in self.stretches)

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
        return max((at + float(stretch.ends.max()) for at, stretch in self.stretches), default=0.0)

    def times(self, resources: Sequence[Resource]) -> tuple[Floats, Floats]:
        """When what occupies any of the resources begins and ends, in no order."""
        places = [_PLACE[name] for name in resources]
        starts, ends = [np.empty(0)], [np.empty(0)]
        for at, stretch in self.stretches:
            chosen = np.isin(stretch.resources, places)
            starts.append(stretch.starts[chosen] + at)
            ends.append(stretch.ends[chosen] + at)
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
    """For each stretch, for how many seconds of each of its collectives no computation runs beside it.

    Where two collectives run at once and nothing computes, the time belongs to the one that began first.
    """
    sizes = [len(stretch.collectives) for _, stretch in intervals.stretches]
    starts = _joined([stretch.starts[stretch.collectives] + at for at, stretch in intervals.stretches])
    ends = _joined([stretch.ends[stretch.collectives] + at for at, stretch in intervals.stretches])
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
    found = Intervals([(0.0, Stretch(tuple(intervals)))])
    for (_, stretch), seconds in zip(found.stretches, exposed_seconds(found), strict=True):
        for place, alone in zip(stretch.collectives.tolist(), seconds.tolist(), strict=True):
            yield stretch.intervals[place], alone


def _joined(parts: Sequence[Any]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0)


def since(intervals: Sequence[Interval], begin: float, renaming: Renaming | None = None) -> Intervals:
    """Return those that do not begin before a moment, in seconds from it.

    Args:
        intervals: of a rank.
        begin: the moment.
        renaming: from the names in them to those that are meant.
    """
    if not begin and isinstance(intervals, Intervals):
        return Intervals(intervals.stretches, renaming)
    found = (
        Interval(item.record, item.cost, item.queue, item.start - begin, item.end - begin)
        for item in intervals
        if item.start >= begin
    )
    return Intervals([(0.0, Stretch(tuple(found)))], renaming)
