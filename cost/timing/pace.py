"""Pace of the host beside that of the device, in spans of a timeline that stand for further ones.

A span stands for more of its kind only while the same of both is the bottleneck. The device is behind the host by its
*lag*. In a span that takes the device longer than the host the lag grows, and otherwise it shrinks; the device runs at
the host's pace where there is none. With further spans the lag is another than in the excerpt that was timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from legoai.cost.timing.repeats import EQUAL, Span, settled
from legoai.cost.timing.timeline import Cost, Host, Timed
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel, Mark, Record
from legoai.cost.trace.segments import Instance, Item


class Paced(NamedTuple):
    """A span, and what the host does meanwhile.

    Attributes:
        span: of the device.
        by_host: seconds that the host takes for it.
        lag: the least by which the device is behind the host; 0 where that is not known.
    """

    span: Span
    by_host: float
    lag: float

    @property
    def took(self) -> float:
        """Seconds that it takes on the device."""
        return self.span.end - self.span.start

    @property
    def gain(self) -> float:
        """By how much the lag grows with all that it stands for; 0 where both take equally long."""
        apart = self.took - self.by_host
        return apart * self.span.more if abs(apart) > EQUAL * self.took else 0.0


class Pace:
    """When the items of a trace begin on the device, and when the host issues them.

    Args:
        items: of a step.
        starts: on the device, from the step's beginning; None where that is not known.
        marks: when the host passes each mark, by name.
        begin: when it passes the step's.
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

        def seconds(record: Record) -> float:
            if isinstance(record, HostKernel):
                return cost(record).seconds
            return host.dispatch(record) if isinstance(record, Kernel | Collective | Copy) else 0.0

        known: dict[int, float] = {}
        self.issued = [0.0]
        """Seconds of the host up to each item, where it waits for nothing."""
        for item in items:
            if not isinstance(item, Instance):
                took = seconds(item)
            elif (took := known.get(id(item.segment), -1.0)) < 0:
                took = known[id(item.segment)] = math.fsum(map(seconds, item.segment.records))
            self.issued.append(self.issued[-1] + took)
        self.passed = [
            (place, marks[item.name] - begin)
            for place, item in enumerate(items)
            if isinstance(item, Mark) and item.name in marks
        ]
        """Marks by place, with when the host passes them."""

    def _lag(self, place: int, start: float) -> float:
        """By how much the device is behind the host at an item; 0 where the host has waited near it."""
        before = max((mark for mark in self.passed if mark[0] <= place), default=None)
        behind = min((mark for mark in self.passed if mark[0] > place), default=None)
        if before is None or behind is None:
            return 0.0
        took = self.issued[behind[0]] - self.issued[before[0]]
        if behind[1] - before[1] > took * (1 + EQUAL):
            return 0.0
        return max(0.0, start - before[1] - (self.issued[place] - self.issued[before[0]]))

    def settled(self, places: Sequence[int], more: int) -> Paced | None:
        """The span between the last of some items that stands for more of them; None where they differ."""
        known = [start for place in places if (start := self.starts[place]) is not None]
        span = settled(known, more) if len(known) == len(places) else None
        if span is None:
            return None
        by_host = self.issued[places[-1]] - self.issued[places[known.index(span.start)]]
        return Paced(span, by_host, min(map(self._lag, places, known)))


def keeps_pace(of_blocks: Sequence[Paced], of_batches: Sequence[Paced]) -> bool:
    """Whether the bottleneck of each span is the same with all that they stand for.

    Args:
        of_blocks: spans of blocks.
        of_batches: those of micro batches, in which spans of blocks lie.
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
