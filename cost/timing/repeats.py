"""Steady-state spans of a timeline, each weighted by the number of equal spans that the trace leaves out.

Equal blocks and micro batches take the same time once the step has reached a steady state: if the last few took equally
long, all further ones do. A span between the starts of two of them then counts as often as there are further ones.
Figures of a step are integrals over its time with these weights.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from legoai.cost.kernels.work import is_product
from legoai.cost.timing.breakdown import DEVICE, Breakdown
from legoai.cost.timing.intervals import RESOURCES, Floats, Intervals, exposed_seconds, spans
from legoai.cost.timing.timeline import COMMUNICATION, Resource
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel, Phase
from legoai.cost.trace.segments import Instance, Item, Segment

EQUAL: Final = 1e-3
"""Relative difference up to which spans count as equal: a fifth of the permitted error of extrapolated times."""


class Span(NamedTuple):
    """A span of a timeline in seconds, and how many further times it occurs."""

    start: float
    end: float
    more: int


class Anchor:
    """The record that identifies instances of a segment in a timeline.

    Attributes:
        record: the first product that occurs once in the segment, or else the first such kernel; None without one.
            Other segments may contain it too.
    """

    def __init__(self, segment: Segment) -> None:
        kernels = [record for record in segment.records if type(record) is Kernel]
        times = Counter(map(id, kernels))
        once = [record for record in kernels if times[id(record)] == 1]
        self.record = next((record for record in once if is_product(record.op)), once[0] if once else None)


def beginnings(items: Sequence[Item], intervals: Intervals) -> list[float | None]:
    """Return the start of each item of a trace; None for single records, and for instances without an anchor.

    Args:
        items: whose names are not translated.
        intervals: of their timeline.
    """
    anchors = [item.segment.summary(Anchor).record if isinstance(item, Instance) else None for item in items]
    known = {id(record) for record in anchors if record is not None}
    starts: defaultdict[int, list[float]] = defaultdict(list)
    for at, held in intervals.segments:
        for interval in held.intervals:
            if id(interval.record) in known:
                starts[id(interval.record)].append(at + interval.start)
    counts = Counter(id(record) for record in anchors if record is not None)
    following = {key: iter(sorted(found)) for key, found in starts.items() if len(found) == counts[key]}
    return [
        None if record is None or id(record) not in following else next(following[id(record)]) for record in anchors
    ]


def takes_time(segment: Segment) -> bool:
    """Whether any op of a segment takes time."""
    return any(isinstance(record, Kernel | Collective | Copy | HostKernel) for record in segment.records)


def runs_of(items: Sequence[Item]) -> Iterator[range]:
    """Yield the ranges of consecutive instances of segments with the same anchor."""

    def anchor(place: int) -> object:
        item = items[place]
        return (item.segment.summary(Anchor).record or item.segment) if isinstance(item, Instance) else None

    for _, places in itertools.groupby(range(len(items)), key=lambda place: id(anchor(place))):
        found = list(places)
        if isinstance(items[found[0]], Instance):
            yield range(found[0], found[-1] + 1)


def settled(starts: Sequence[float], more: int) -> Span | None:
    """Return the last one or two spans between starts of instances, with their weight; None where spans differ.

    Two spans may alternate: communication beside every second block can already be complete for the next one.
    """
    took = [end - start for start, end in itertools.pairwise(starts)]
    for period in (1, 2):
        pairs = list(zip(took, took[period:], strict=False))[-2:]
        if pairs and more % period == 0 and all(abs(one - other) <= EQUAL * min(one, other) for one, other in pairs):
            return Span(starts[-1 - period], starts[-1], more // period)
    return None


class Weights:
    """Weights of the points in time of a timeline.

    Args:
        spans: that count more than once; a span nested in another counts in each of its repetitions.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        edges = sorted({0.0, *(edge for span in spans for edge in span[:2])})
        self.edges = np.array(edges)
        self.times = np.ones(len(edges))
        for span in spans:
            inside = (self.edges >= span.start) & (self.edges < span.end)
            self.times[inside] *= 1 + span.more
        self.before = np.concatenate([[0.0], np.cumsum(np.diff(self.edges) * self.times[:-1])])

    def at(self, moments: Floats) -> Floats:
        """Return the weights at some points in time."""
        found: Floats = self.times[np.searchsorted(self.edges, moments, side="right") - 1]
        return found

    def until(self, moments: Floats) -> Floats:
        """Return the seconds of the whole step up to some points in time of its excerpt."""
        place = np.searchsorted(self.edges, moments, side="right") - 1
        found: Floats = self.before[place] + (moments - self.edges[place]) * self.times[place]
        return found


def weighted_breakdown(intervals: Intervals, end: float, weights: Weights) -> Breakdown:
    """Return the breakdown of a step of which some spans were left out.

    Args:
        intervals: of the excerpt, from the beginning of the step.
        end: of the excerpt.
        weights: of points in time.
    """

    def busy(resources: Sequence[Resource]) -> float:
        starts, ends = spans(intervals, resources)
        return float((weights.until(ends) - weights.until(starts)).sum())

    phases: defaultdict[Phase, float] = defaultdict(float)
    axes: defaultdict[str, float] = defaultdict(float)
    compute = slowed = communication = 0.0
    for (at, held), alone in zip(intervals.segments, exposed_seconds(intervals), strict=True):
        times = weights.at(held.starts + at).tolist()
        for item, count in zip(held.intervals, times, strict=True):
            took = (item.end - item.start) * count
            if item.cost.resource == "compute":
                compute += took
                slowed += took - item.cost.seconds * count
                phases[getattr(item.record, "phase", "other")] += took
            if isinstance(item.record, Collective):
                communication += took
        for place, bare in zip(held.collectives.tolist(), alone.tolist(), strict=True):
            record = held.intervals[place].record
            assert isinstance(record, Collective)
            axes[record.axis or "other"] += bare * times[place]
    seconds = float(weights.until(np.array([end]))[0])
    on_device, everything = busy(DEVICE), busy(RESOURCES)
    return Breakdown(
        seconds=seconds,
        compute=compute,
        exposed=sum(axes.values()),
        copies=max(0.0, on_device - busy(("compute", *COMMUNICATION))),
        host=max(0.0, everything - on_device),
        idle=max(0.0, seconds - everything),
        by_kind={},
        by_phase=dict(phases),
        recompute=phases["recompute"],
        slowed=max(0.0, slowed),
        communication=communication,
        exposed_by_axis={axis: took for axis, took in axes.items() if took > 0},
        by_model={},
    )
