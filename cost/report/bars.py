"""Bars of a timeline, merged until few enough to be drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from legoai.cost.estimate import RankEstimate
from legoai.cost.report.chrome import Lines, title, tracks
from legoai.cost.report.words import path
from legoai.cost.timing.breakdown import COMMUNICATION
from legoai.cost.timing.timeline import Interval
from legoai.cost.trace.records import Collective, Copy

MOST: Final = 30_000
"""Bars of a page; where there are more, neighbours of one module are drawn as one."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One or several operations on a track, in seconds from the beginning of the step.

    ``look`` is the phase of a computation, `communication` or `copy`; ``line`` the place in the plan behind it.
    """

    start: float
    end: float
    name: str
    module: str
    look: str
    line: str


@dataclass(frozen=True, slots=True)
class Track:
    """A queue of a rank, and what runs on it in order."""

    name: str
    bars: tuple[Bar, ...]


def rank_tracks(item: RankEstimate, lines: Lines, *, most: int = MOST) -> tuple[Track, ...]:
    """The tracks of a rank, at most about ``most`` bars of them."""
    levels: Sequence[Callable[[Interval], object]] = (
        lambda interval: (interval.record.module, interval.record.phase),
        lambda interval: (_block(interval.record.module), interval.record.phase),
        lambda interval: interval.record.phase,
    )
    queues = {queue: [one for one in item.intervals if one.queue == queue] for queue in tracks(item)}
    groups = {queue: [[one] for one in found] for queue, found in queues.items()}
    for level in levels:
        if sum(map(len, groups.values())) <= most:
            break
        groups = {queue: _joined(found, level) for queue, found in queues.items()}
    return tuple(
        Track(track_name(queue, item), tuple(_bar(group, lines) for group in found)) for queue, found in groups.items()
    )


def track_name(queue: str, item: RankEstimate) -> str:
    """What a queue is called for people."""
    if queue.startswith("communicator "):
        return queue.removeprefix("communicator ")
    if queue == tracks(item)[0]:
        return "compute"
    return queue


def _joined(intervals: Sequence[Interval], level: Callable[[Interval], object]) -> list[list[Interval]]:
    """Neighbours that are alike together, unless more time than they take themselves lies between them."""
    groups: list[list[Interval]] = []
    for item in intervals:
        last = groups[-1] if groups else None
        if last is not None and level(last[0]) == level(item):
            gap, own = item.start - last[-1].end, item.end - item.start
            if gap <= own:
                last.append(item)
                continue
        groups.append([item])
    return groups


def _block(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _bar(group: Sequence[Interval], lines: Lines) -> Bar:
    first = group[0].record
    name = title(first) if len(group) == 1 else f"{len(group)} operations"
    longest = max(group, key=lambda item: item.end - item.start).record
    return Bar(group[0].start, group[-1].end, name, path(first.module), _look(group[0]), lines.of(longest))


def _look(item: Interval) -> str:
    if isinstance(item.record, Collective) or item.cost.resource in COMMUNICATION:
        return "communication"
    return "copy" if isinstance(item.record, Copy) else item.record.phase
