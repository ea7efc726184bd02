"""Bars of a timeline, merged down to a drawable number."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from legoai.cost.estimate import RankEstimate
from legoai.cost.report.chrome import Lines, title, tracks
from legoai.cost.timing.intervals import Intervals, SegmentIntervals
from legoai.cost.timing.timeline import COMMUNICATION, Interval, Timed
from legoai.cost.trace.records import Collective, Copy
from legoai.cost.words import path

MOST: Final = 30_000
"""Most bars of a page; where there are more, neighbours of one module are drawn as one."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One or several operations on a track, in seconds from the beginning of the step.

    Attributes:
        start: of the first operation.
        end: of the last.
        busy: seconds of the operations, without the gaps between them.
        name: of the operation, or the number of them.
        module: of the first.
        look: the phase of a computation, `communication` or `copy`.
        line: the line of the plan that causes it.
    """

    start: float
    end: float
    busy: float
    name: str
    module: str
    look: str
    line: str

    @property
    def share(self) -> float:
        """Busy share of its time."""
        return min(1.0, self.busy / (self.end - self.start)) if self.end > self.start else 1.0


@dataclass(frozen=True, slots=True)
class Track:
    """A queue of a rank, with its bars in order."""

    name: str
    bars: tuple[Bar, ...]


_Level: TypeAlias = Callable[[str, str], object]
"""Key from module and phase; neighbouring operations with equal keys are drawn as one bar."""

_LEVELS: Final[Sequence[_Level]] = (
    lambda module, phase: (module, phase),
    lambda module, phase: (_block(module), phase),
    lambda _, phase: phase,
)


def rank_tracks(item: RankEstimate, lines: Lines, *, most: int) -> tuple[Track, ...]:
    """Return the tracks of a rank, with at most ``most`` bars and one for each track.

    Where there are more operations, neighbours of one module and phase are drawn as one bar; else those of one block
    and phase; else those of one phase; else those that begin in one slice of the step, which is as long on all tracks.
    The operations of a bar leave at most two such slices idle between them.
    """
    intervals = Intervals.of(item.intervals)
    groups = {}
    for level in _LEVELS if len(intervals) > most else (None,):
        groups = _groups(intervals, level, intervals.end / most)
        if sum(map(len, groups.values())) <= most:
            break
    else:
        groups = _sliced(groups, intervals.end, most)
    return tuple(
        Track(track_name(queue, place), tuple(_bar(group, lines) for group in groups[queue]))
        for place, queue in enumerate(tracks(item))
    )


def track_name(queue: str, place: int) -> str:
    """Return the displayed name of a queue; the first is the stream with most operations."""
    if queue.startswith("communicator "):
        return queue.removeprefix("communicator ")
    return queue if place else "compute"


@dataclass(slots=True)
class _Group:
    """Neighbouring operations of a queue that are drawn as one bar.

    Attributes:
        start: of the first operation, in seconds.
        end: of the last.
        own: seconds of the first.
        busy: seconds of all of them, without the gaps between them.
        count: number of operations.
        look: of the first.
        first: the first operation.
        longest: the longest operation.
        longest_seconds: its time.
        common: the key that they share.
    """

    start: float
    end: float
    own: float
    busy: float
    count: int
    look: str
    first: Timed
    longest: Timed
    longest_seconds: float
    common: object

    def shifted(self, by: float) -> _Group:
        """Return a copy that begins later; `dataclasses.replace` takes ten times as long."""
        return _Group(
            self.start + by,
            self.end + by,
            self.own,
            self.busy,
            self.count,
            self.look,
            self.first,
            self.longest,
            self.longest_seconds,
            self.common,
        )

    def add(self, later: _Group) -> _Group:
        """Merge a group that begins later into this one."""
        self.end = max(self.end, later.end)
        self.busy += later.busy
        self.count += later.count
        if later.longest_seconds > self.longest_seconds:
            self.longest, self.longest_seconds = later.longest, later.longest_seconds
        return self


def _groups(intervals: Intervals, level: _Level | None, idle: float) -> dict[str, list[_Group]]:
    """Return the groups of each queue in order. Each segment is merged once; without a level nothing is merged.

    Args:
        intervals: of the rank.
        level: gives the key by which neighbours are merged.
        idle: most seconds without an operation within a group.
    """
    merged: dict[int, dict[str, list[_Group]]] = {}
    found: dict[str, list[_Group]] = {}
    for at, segment in intervals.segments:
        if id(segment) not in merged:
            merged[id(segment)] = _merged(intervals, segment, level, idle)
        for queue, groups in merged[id(segment)].items():
            found.setdefault(queue, []).extend(group.shifted(at) for group in groups)
    for queue, groups in found.items():
        groups.sort(key=lambda group: (group.start, group.end))
        if level is not None:
            found[queue] = _joined(groups, idle)
    return found


def _merged(
    intervals: Intervals, segment: SegmentIntervals, level: _Level | None, idle: float
) -> dict[str, list[_Group]]:
    """Return the groups of a segment by queue, with the records of its instance."""
    queues: dict[str, list[_Group]] = {}
    for item in sorted(segment.intervals, key=lambda item: (item.start, item.end)):
        record, seconds = item.record, item.end - item.start
        module = record.module if segment.named else intervals.path(record.module)
        common = level(module, record.phase) if level is not None else None
        group = _Group(item.start, item.end, seconds, seconds, 1, _look(item), record, record, seconds, common)
        queues.setdefault(item.queue, []).append(group)
    if segment.named:  # others may run between its operations
        return queues
    if level is not None:
        queues = {queue: _joined(groups, idle) for queue, groups in queues.items()}
    for group in itertools.chain.from_iterable(queues.values()):
        group.first, group.longest = intervals.meant(group.first), intervals.meant(group.longest)
    return queues


def _joined(groups: Sequence[_Group], idle: float) -> list[_Group]:
    """Merge neighbours of equal keys, unless the gap between them is longer than the later operation.

    Args:
        groups: of a queue, in order.
        idle: most seconds without an operation within a group.
    """
    found: list[_Group] = []
    for item in groups:
        last = found[-1] if found else None
        if (
            last is None
            or last.common != item.common
            or item.start - last.end > item.own
            or item.end - last.start - last.busy - item.busy > idle
        ):
            found.append(item)
        else:
            last.add(item)
    return found


def _sliced(groups: Mapping[str, Sequence[_Group]], seconds: float, most: int) -> dict[str, list[_Group]]:
    """Return at most ``most`` groups and one for each queue, merging those that begin in one slice of the step.

    The slices are the same for all queues, and as short as that number allows. A queue with no more groups than slices
    stays as it is.
    """
    counts, left, slices = sorted(map(len, groups.values())), most, 1
    for place, count in enumerate(counts):
        slices = max(1, left // (len(counts) - place))
        if count > slices:
            break
        left -= count

    def slice_of(item: _Group) -> int:
        return min(int(item.start / seconds * slices), slices - 1)

    return {
        queue: list(items)
        if len(items) <= slices
        else [functools.reduce(_Group.add, same) for _, same in itertools.groupby(items, slice_of)]
        for queue, items in groups.items()
    }


def _block(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _bar(group: _Group, lines: Lines) -> Bar:
    name = title(group.first) if group.count == 1 else f"{group.count} operations"
    return Bar(group.start, group.end, group.busy, name, path(group.first.module), group.look, lines.of(group.longest))


def _look(item: Interval) -> str:
    if isinstance(item.record, Collective) or item.cost.resource in COMMUNICATION:
        return "communication"
    return "copy" if isinstance(item.record, Copy) else item.record.phase
