"""Bars of a timeline, merged down to a drawable number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from legoai.cost.estimate import RankEstimate
from legoai.cost.report.chrome import Lines, title, tracks
from legoai.cost.report.words import path
from legoai.cost.timing.breakdown import COMMUNICATION
from legoai.cost.timing.intervals import Intervals, SegmentIntervals
from legoai.cost.timing.timeline import Interval, Timed
from legoai.cost.trace.records import Collective, Copy

MOST: Final = 30_000
"""Most bars of a page; where there are more, neighbours of one module are drawn as one."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One or several operations on a track, in seconds from the beginning of the step.

    ``look`` is the phase of a computation, `communication` or `copy`; ``line`` the line of the plan that causes it.
    """

    start: float
    end: float
    name: str
    module: str
    look: str
    line: str


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


def rank_tracks(item: RankEstimate, lines: Lines, *, most: int = MOST) -> tuple[Track, ...]:
    """Return the tracks of a rank, with at most ``most`` bars and one for each track.

    Where there are more operations, neighbours of one module and phase are drawn as one bar; else those of one block
    and phase; else those of one phase; else those that begin in one slice of the step.
    """
    intervals = Intervals.of(item.intervals)
    groups = {}
    for level in _LEVELS if len(intervals) > most else (None,):
        groups = _groups(intervals, level)
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
            self.count,
            self.look,
            self.first,
            self.longest,
            self.longest_seconds,
            self.common,
        )


def _groups(intervals: Intervals, level: _Level | None) -> dict[str, list[_Group]]:
    """Return the groups of each queue in order. Each segment is merged once; without a level nothing is merged."""
    merged: dict[int, dict[str, list[_Group]]] = {}
    found: dict[str, list[_Group]] = {}
    for at, segment in intervals.segments:
        if id(segment) not in merged:
            merged[id(segment)] = _merged(intervals, segment, level)
        for queue, groups in merged[id(segment)].items():
            found.setdefault(queue, []).extend(group.shifted(at) for group in groups)
    for queue, groups in found.items():
        groups.sort(key=lambda group: (group.start, group.end))
        if level is not None:
            found[queue] = _joined(groups)
    return found


def _merged(intervals: Intervals, segment: SegmentIntervals, level: _Level | None) -> dict[str, list[_Group]]:
    """Return the groups of a segment by queue, with the records of its instance."""
    queues: dict[str, list[_Group]] = {}
    for item in sorted(segment.intervals, key=lambda item: (item.start, item.end)):
        record, seconds = item.record, item.end - item.start
        module = record.module if segment.named else intervals.path(record.module)
        common = level(module, record.phase) if level is not None else None
        group = _Group(item.start, item.end, seconds, 1, _look(item), record, record, seconds, common)
        queues.setdefault(item.queue, []).append(group)
    if segment.named:  # others may run between its operations
        return queues
    if level is not None:
        queues = {queue: _joined(groups) for queue, groups in queues.items()}
    for group in itertools.chain.from_iterable(queues.values()):
        group.first, group.longest = intervals.meant(group.first), intervals.meant(group.longest)
    return queues


def _joined(groups: Sequence[_Group], *, across_gaps: bool = False) -> list[_Group]:
    """Merge neighbours of equal keys, unless the gap between them is longer than the later operation."""
    found: list[_Group] = []
    for item in groups:
        last = found[-1] if found else None
        if last is None or last.common != item.common or (not across_gaps and item.start - last.end > item.own):
            found.append(item)
            continue
        last.end = item.end
        last.count += item.count
        if item.longest_seconds > last.longest_seconds:
            last.longest, last.longest_seconds = item.longest, item.longest_seconds
    return found


def _sliced(groups: Mapping[str, Sequence[_Group]], seconds: float, most: int) -> dict[str, list[_Group]]:
    """Return at most ``most`` groups and one for each queue, merging those that begin in one slice of the step."""
    total = sum(map(len, groups.values()))
    found = {}
    for queue, items in groups.items():
        slices = most * len(items) // total or 1
        for item in items:
            item.common = int(item.start / seconds * slices)
        found[queue] = _joined(items, across_gaps=True)
    return found


def _block(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _bar(group: _Group, lines: Lines) -> Bar:
    name = title(group.first) if group.count == 1 else f"{group.count} operations"
    return Bar(group.start, group.end, name, path(group.first.module), group.look, lines.of(group.longest))


def _look(item: Interval) -> str:
    if isinstance(item.record, Collective) or item.cost.resource in COMMUNICATION:
        return "communication"
    return "copy" if isinstance(item.record, Copy) else item.record.phase
