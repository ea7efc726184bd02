"""Pace of the host relative to the device, within spans of a timeline that represent further ones.

A span represents further ones only while its bottleneck, host or device, stays the same. The *lag* is how far the
device is behind the host. It grows in a span that takes the device longer than the host, and otherwise shrinks; without
lag the device runs at the host's pace. With further spans the lag differs from that in the timed excerpt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from legoai.cost.timing.repeats import EQUAL, Span, settled
from legoai.cost.timing.timeline import Cost, Host, Timed
from legoai.cost.trace.records import (
    Collective,
    Copy,
    HostKernel,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    Record,
)
from legoai.cost.trace.segments import Instance, Item


class Paced(NamedTuple):
    """A span, with the pace of the host.

    Attributes:
        span: of the device.
        by_host: seconds of the host for it.
        lag: lower bound of the device's lag behind the host; 0 where it is not known.
    """

    span: Span
    by_host: float
    lag: float

    @property
    def took(self) -> float:
        """Its seconds on the device."""
        return self.span.end - self.span.start

    @property
    def gain(self) -> float:
        """Growth of the lag over all spans that it represents; 0 where host and device take equally long."""
        apart = self.took - self.by_host
        return apart * self.span.more if abs(apart) > EQUAL * self.took else 0.0


class Issued(NamedTuple):
    """Work of the host before each of some items, and after the last.

    Attributes:
        seconds: of the host, without waits.
        waits: number of items at which it may wait.
    """

    seconds: list[float]
    waits: list[int]


def issued(items: Sequence[Item], *, cost: Callable[[Timed], Cost], host: Host) -> Issued:
    """Return the work of the host for some items of a trace.

    Args:
        items: of a trace.
        cost: of an operation when nothing runs beside it.
        host: that issues them.
    """

    def seconds(record: Record) -> float:
        if isinstance(record, HostKernel):
            return cost(record).seconds
        return host.dispatch(record) if isinstance(record, Kernel | Collective | Copy) else 0.0

    known: dict[int, tuple[float, bool]] = {}
    found = Issued([0.0], [0])
    for item in items:
        if not isinstance(item, Instance):
            took, may_wait = seconds(item), _waits(item)
        elif id(item.segment) in known:
            took, may_wait = known[id(item.segment)]
        else:
            records = item.segment.records
            took, may_wait = known[id(item.segment)] = (
                math.fsum(map(seconds, records)),
                any(map(_waits, records)),
            )
        found.seconds.append(found.seconds[-1] + took)
        found.waits.append(found.waits[-1] + may_wait)
    return found


class Pace:
    """Times at which the items of a trace begin on the device, and at which the host issues them.

    Args:
        items: of a step.
        starts: on the device, from the step's beginning; None where that is not known.
        marks: times at which the host passes each mark, by name.
        begin: time at which the host passes the mark of the step.
        cost: of an operation when nothing runs beside it.
        host: that issues them.
    """

    def __init__(
        self,
        items: Sequence[Item],
        starts: Sequence[float | None],
        marks: Mapping[str, float],
        begin: float,
        *,
        cost: Callable[[Timed], Cost],
        host: Host,
    ) -> None:
        self.starts = starts
        self.issued, self.waits = issued(items, cost=cost, host=host)
        self.passed = [
            (place, marks[item.name] - begin)
            for place, item in enumerate(items)
            if isinstance(item, Mark) and item.name in marks
        ]
        """Marks by index, with the times at which the host passes them."""

    def _lag(self, place: int, start: float) -> float:
        """Return the lag of the device at an item; 0 where the host may have waited since the previous mark."""
        before = max((mark for mark in self.passed if mark[0] <= place), default=None)
        behind = min((mark for mark in self.passed if mark[0] > place), default=None)
        if before is None or behind is None:
            return 0.0
        took = self.issued[behind[0]] - self.issued[before[0]]
        if self.waits[place] > self.waits[before[0]] and behind[1] - before[1] > took * (1 + EQUAL):
            return 0.0
        return max(0.0, start - before[1] - (self.issued[place] - self.issued[before[0]]))

    def settled(self, places: Sequence[int], more: int) -> Paced | None:
        """Return the last span between some items if it can represent further ones; None where the spans differ."""
        known = [start for place in places if (start := self.starts[place]) is not None]
        span = settled(known, more) if len(known) == len(places) else None
        if span is None:
            return None
        by_host = self.issued[places[-1]] - self.issued[places[known.index(span.start)]]
        return Paced(span, by_host, min(map(self._lag, places, known)))


def _waits(record: Record) -> bool:
    """Whether the host waits at a record for operations that it has issued."""
    if isinstance(record, Copy):
        return record.blocking
    return isinstance(record, HostWaitDevice | HostWaitEvent | HostWaitStream)


def keeps_pace(of_blocks: Sequence[Paced], of_batches: Sequence[Paced]) -> bool:
    """Whether each span keeps its bottleneck with all the spans that it represents.

    Args:
        of_blocks: spans of blocks.
        of_batches: spans of micro batches, which contain spans of blocks.
    """
    gained = 0.0
    for paced in sorted(of_blocks):
        at_hosts_pace = paced.gain == 0.0
        if at_hosts_pace and gained > EQUAL * paced.took:
            return False
        if not at_hosts_pace and paced.lag + gained + min(0.0, paced.gain) < 0:
            return False
        gained += paced.gain
    for paced in of_batches:
        inside = [item for item in of_blocks if paced.span.start <= item.span.start < paced.span.end]
        if paced.took - paced.by_host + sum(item.gain for item in inside) < -EQUAL * paced.took:
            return False
    return True
