"""Timelines of ranks that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from legoai.cost.timing.intervals import SegmentIntervals
from legoai.cost.timing.timeline import Timeline
from legoai.cost.trace.pickling import pickled_by_position


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOp:
    """Many operations of one rank as one, where nothing in them waits for another rank.

    Attributes:
        stream: whose earlier work they follow and whose later work follows them.
        seconds: of the device, where the host is ahead.
        latency: from when the host begins to issue them to when the device is done, where the device is idle before.
        host_seconds: for which the host issues them.
        works: the collectives among them, by number, which later operations may wait for.
        events: those that they record.
        intervals: when each runs, from the beginning of the action.
    """

    stream: int
    seconds: float
    latency: float
    host_seconds: float
    works: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    intervals: SegmentIntervals = field(default_factory=lambda: SegmentIntervals(()))


class StandstillError(ValueError):
    """Ranks wait for each other in a circle; the message names what each of them waits for."""


@pickled_by_position
@dataclass(frozen=True, slots=True)
class ActionTime:
    """An action of a pipeline on its rank's device, in seconds; `name` as in its mark."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """When everything ran on one rank.

    Attributes:
        timeline: as for a rank alone.
        actions: of a pipeline, in the order in which the host issued them.
        waits: when the device did nothing because what was next waited for another rank.
    """

    timeline: Timeline
    actions: tuple[ActionTime, ...]
    waits: tuple[tuple[float, float], ...]
