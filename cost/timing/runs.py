"""Runs: consecutive kernels on a stream, which are simulated as one node.

Where only sums over kernels are needed, kernels of one phase without synchronisation between them form a run. A run
takes the time of its kernels one by one; beside communication each is slowed by its own factor. Between two kernels,
the run yields to an operation of another stream that has become ready. Kernels share a node only if each is
issued before the preceding one can end; where the host is behind, the run continues with another node.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from legoai.cost.timing.nodes import Node, stream_name
from legoai.cost.timing.timeline import Cost, Host, Left, Timed
from legoai.cost.trace.records import Kernel

_MODEL: Final = "run of kernels"


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Kernels of one stream and one phase, without synchronisation between them."""

    records: tuple[Kernel, ...]


class RunTimes:
    """Times of the kernels of a run.

    Attributes:
        records: the kernels.
        queue: of their stream.
        costs: of each when nothing runs beside it.
        issues: seconds of the host from before the first until it has issued each.
        alone: seconds of the device before each kernel and after the last, when nothing runs beside them.
        whole: the cost of all together.
        lead: seconds for which the stream must be busy when the first is issued, so that none waits for the host.
    """

    def __init__(self, run: Run, cost: Callable[[Timed], Cost], host: Host) -> None:
        self.records, self.host = run.records, host
        self.queue = stream_name(run.records[0].stream)
        self.costs = list(map(cost, run.records))
        self.issues = list(itertools.accumulate(map(host.dispatch, run.records)))
        self.alone = list(itertools.accumulate([item.seconds for item in self.costs], initial=0.0))
        before = self.issues[0]
        self.lead = max((issue - before - done for issue, done in zip(self.issues, self.alone, strict=False)))
        self.whole = Cost(seconds=self.alone[-1], resource="compute", model=_MODEL)
        self._beside: dict[Left, list[float]] = {}

    def together(self, first: int, busy: float) -> int:
        """Return the end of the kernels that share a node: each is issued before the preceding one ends.

        Args:
            first: of them, which the host issues now.
            busy: seconds for which the stream is busy from now on, at least.
        """
        if not first and busy >= self.lead:
            return len(self.records)
        since = busy + self.issues[first] - self.alone[first]
        for place in range(first + 1, len(self.records)):
            if self.issues[place] > since + self.alone[place]:
                return place
        return len(self.records)

    def beside(self, left: Left | None) -> list[float]:
        """Return :attr:`alone` scaled for collectives that run beside the kernels."""
        if left is None:
            return self.alone
        found = self._beside.get(left)
        if found is None:
            slowed = [item.seconds * self.host.factor(item, left) for item in self.costs]
            found = self._beside[left] = list(itertools.accumulate(slowed, initial=0.0))
        return found

    def cost(self, first: int, end: int) -> Cost:
        """Return the cost of some kernels."""
        if end - first == len(self.costs):
            return self.whole
        return Cost(seconds=self.alone[end] - self.alone[first], resource="compute", model=_MODEL)


class RunNode(Node):
    """Kernels of a run in progress.

    Attributes:
        times: of the run.
        first: index of the next or running kernel when the node last began.
        until: end index of the kernels that run before it yields.
        last: end index of its kernels.
        left: by the collectives that run beside it; None beside none.
        ends: seconds before each kernel of the run and after the last, beside these collectives.
        origin: time from which these count.
    """

    __slots__ = ("ends", "first", "last", "left", "origin", "times", "until")

    def __init__(self, order: int, times: RunTimes, first: int) -> None:
        super().__init__(order, times.records[first], times.whole, times.queue)
        self.times, self.first = times, first
        self.until = self.last = len(times.costs)
        self.left: Left | None = None
        self.ends: Sequence[float] = times.alone
        self.origin = 0.0

    def begin(self, now: float) -> None:
        """Let it run."""
        self.start = now
        self.left, self.ends = None, self.times.alone
        self.origin = now - self.ends[self.first]
        self.end = self.origin + self.ends[self.until]

    def slow(self, now: float, host: Host, left: Left | None) -> None:
        """Run each of its kernels from now on at its speed beside these collectives."""
        if left == self.left:
            return
        place, before, ends = self._place(now), self.ends, self.times.beside(left)
        took = before[place + 1] - before[place]
        share = max(0.0, before[place + 1] - (now - self.origin)) / took if took else 0.0
        self.left, self.ends = left, ends
        self.origin = now + share * (ends[place + 1] - ends[place]) - ends[place + 1]
        self.end = self.origin + ends[self.until]

    def give_way(self, now: float) -> None:
        """End after the running kernel, to continue with the next one later."""
        self.until = self._place(now) + 1
        self.end = self.origin + self.ends[self.until]

    def go_on(self) -> None:
        """Continue with the remaining kernels."""
        self.first, self.until = self.until, self.last
        self.record = self.times.records[self.first]

    def taken(self) -> Cost:
        """The cost of the kernels that ran since it last began."""
        return self.times.cost(self.first, self.until)

    def _place(self, now: float) -> int:
        """Return the index of the running kernel."""
        return bisect_right(self.ends, now - self.origin, self.first + 1, self.until) - 1
