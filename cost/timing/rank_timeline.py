"""Timelines of ranks that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from legoai.cost.timing.intervals import SegmentIntervals
from legoai.cost.timing.timeline import Timeline
from legoai.cost.trace.pickling import pickled_by_position


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOp:
    """Many operations of one rank as one, none of which waits for another rank.

    Attributes:
        stream: on which the action runs.
        seconds: of the device, where the host is ahead.
        latency: from when the host begins to issue them until the device is done, where the device is idle before.
        host_seconds: of the host to issue them.
        works: numbers of its collectives, for which later operations may wait.
        events: that it records.
        intervals: of its operations, from the beginning of the action.
    """

    stream: int
    seconds: float
    latency: float
    host_seconds: float
    works: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    intervals: SegmentIntervals = field(default_factory=lambda: SegmentIntervals(()))


class StandstillError(ValueError):
    """Ranks wait for each other in a cycle; the message names what each of them waits for."""


@pickled_by_position
@dataclass(frozen=True, slots=True)
class ActionTime:
    """An action of a pipeline on its rank's device, in seconds; `name` as in its mark."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """Timeline of one of several ranks.

    Attributes:
        timeline: as for a rank alone.
        actions: of a pipeline, in issue order.
        waits: times at which the device was idle because its next operation waited for another rank.
    """

    timeline: Timeline
    actions: tuple[ActionTime, ...]
    waits: tuple[tuple[float, float], ...]
