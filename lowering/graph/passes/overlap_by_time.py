"""Reordering by times: all-gathers start as late, and reductions are waited for as early, as full overlap allows.

    forward     gather 2, wait 2, compute 2             ->  compute a, gather 2, compute b, wait 2, compute 2
    backward    scatter 2, wait, compute 1              ->  scatter 2, compute a, wait, compute b

The pass of :mod:`~legoai.lowering.graph.passes.overlap` moves a collective past one bucket, however little that
computes: a single norm hides nothing. Here the times of the nodes determine the distance. Collectives of a group run
one after another in the order of their starts, so an all-gather starts before those reductions that would delay it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Final, NamedTuple

from torch import fx

from legoai.lowering.graph.passes.memory import bytes_of, held
from legoai.lowering.graph.passes.overlap import Collective, begin_of_backward, gathers_of, move, reductions_of
from legoai.lowering.graph.step.collectives import in_order
from legoai.lowering.graph.step.operators import SCATTERS, SUM_OVER_REPLICAS
from legoai.lowering.graph.step.step_graph import StepGraph

Milliseconds = Callable[[fx.Node], float | None]

_SLACK: Final = 1.25
"""Factor by which a collective may exceed its predicted time before it is exposed."""


class Span(NamedTuple):
    """A time interval."""

    begin: float
    end: float


def overlap_by_time(
    graph: StepGraph, *, milliseconds: Milliseconds, limit: int | None = None, moments: int = 0
) -> None:
    """Move all-gathers and waits of reductions to where the times of the nodes in between hide them.

    Args:
        graph: whose collectives are waited for where they start.
        milliseconds: of its nodes; equal on all ranks, which would otherwise deadlock.
        limit: of the device's memory, which no all-gather moved to an earlier start may exceed.
        moments: values per element of a parameter that the optimizer keeps on the device.
    """
    before = 0 if limit is None else max(held(graph, moments))
    ahead = _gather_ahead(graph, milliseconds)
    if limit is not None:
        _gather_late(graph, ahead, most=max(limit, before), moments=moments)
    for kind in (SCATTERS, (SUM_OVER_REPLICAS,)):
        _wait_late(graph, reductions_of(graph, kind), milliseconds)


def _gather_ahead(graph: StepGraph, milliseconds: Milliseconds) -> list[Collective]:
    """Start each all-gather of a phase as late as it can end before its wait; return them in order."""
    forward, backward = gathers_of(graph)
    starting = set(chain.from_iterable(gather.start for gather in (*forward, *backward)))
    clock = Clock(graph, starting, milliseconds)
    taken = {gather: _SLACK * sum(map(clock.milliseconds, gather.start)) for gather in (*forward, *backward)}
    scatters = reductions_of(graph, SCATTERS)
    busy = served(
        (clock.begin(scatter.start[0]) for scatter in scatters),
        (_SLACK * clock.milliseconds(scatter.start[0]) for scatter in scatters),
    )
    firsts = [clock.nodes[0]]
    if backward:
        begin = begin_of_backward(graph)
        while begin in starting:
            begin = begin.next
        firsts.append(begin)
    for gathers, first in zip((forward, backward), firsts, strict=False):
        waits = [clock.begin(gather.wait[0]) for gather in gathers]
        starts = latest_starts(waits, [taken[gather] for gather in gathers], busy)
        for gather, start in zip(gathers, starts, strict=True):
            move(gather.start, clock.running(start, first=first, last=gather.wait[0]))
    return [*forward, *backward]


def _gather_late(graph: StepGraph, gathers: Sequence[Collective], *, most: int, moments: int) -> None:
    """Start all-gathers where they are waited for, as long as the memory limit is exceeded."""
    left = list(gathers)
    while left and max(curve := held(graph, moments)) > most:
        late = list(_too_early(graph, left, curve, most))
        if not late:
            return
        for gather in late:
            move(gather.start, gather.wait[0])
            left.remove(gather)


def _too_early(graph: StepGraph, gathers: Sequence[Collective], curve: list[int], most: int) -> Iterator[Collective]:
    """Yield all-gathers whose buffers make a memory curve too high, the latest ones first, and lower the curve."""
    place = in_order(graph)
    spans = {gather: (place[gather.start[-1]], place[gather.wait[0]]) for gather in gathers}
    while spans and (highest := max(curve)) > most:
        node = curve.index(highest)
        found = max(
            (item for item, (begin, end) in spans.items() if begin <= node < end), key=spans.__getitem__, default=None
        )
        if found is None:
            return
        begin, end = spans.pop(found)
        size = bytes_of(found.start[-1].meta["val"])
        curve[begin:end] = [bytes - size for bytes in curve[begin:end]]
        yield found


def _wait_late(graph: StepGraph, reductions: Sequence[Collective], milliseconds: Milliseconds) -> None:
    """Wait for each reduction when it has ended, after the collectives of its group that started before it."""
    groups = {_group(item.start[-1]) for item in reductions}
    clock = Clock(graph, set(chain.from_iterable(item.wait for item in reductions)), milliseconds)
    sent = [node for node in clock.nodes if graph.of_unit(node) and _group(node) in groups]
    spans = served(map(clock.begin, sent), (_SLACK * clock.milliseconds(node) for node in sent))
    end = {node: span.end for node, span in zip(sent, spans, strict=True)}
    for item in reductions:
        start = item.start[-1]
        move(item.wait, clock.behind(end[start], start))


def served(released: Iterable[float], taken: Iterable[float]) -> list[Span]:
    """Return the intervals of jobs that run one after another, by their release times and durations."""
    found: list[Span] = []
    for there, time in zip(released, taken, strict=True):
        begin = max(there, found[-1].end) if found else there
        found.append(Span(begin, begin + time))
    return found


def latest_starts(waits: Sequence[float], taken: Sequence[float], busy: Sequence[Span]) -> list[float]:
    """Return start times of all-gathers that end before their waits, each before the next one starts.

    Args:
        waits: time of each wait, in order.
        taken: duration of each.
        busy: intervals of the group's reductions, in order; it gathers in between.
    """
    found: list[float] = []
    end = waits[-1] if waits else 0.0
    for wait, time in zip(reversed(waits), reversed(taken), strict=True):
        end = _latest(min(wait, end), time, busy)
        found.append(end)
    return found[::-1]


def _latest(end: float, time: float, busy: Sequence[Span]) -> float:
    """Return the latest start from which there is enough time until an end, outside of busy intervals."""
    for index in range(bisect_left(busy, (end,)) - 1, -1, -1):
        span = busy[index]
        free = end - min(span.end, end)
        if free >= time:
            break
        time -= free
        end = span.begin
    return end - time


class Clock:
    """Start times of nodes if they run one after another, without waiting for a unit's collectives.

    Args:
        graph: of the nodes.
        moving: nodes to be moved, which are skipped.
        milliseconds: of nodes.

    Attributes:
        nodes: in order.
    """

    def __init__(self, graph: StepGraph, moving: Container[fx.Node], milliseconds: Milliseconds) -> None:
        self.nodes: list[fx.Node] = [
            node for node in graph.graph.nodes if node.op != "placeholder" and node not in moving
        ]
        self._milliseconds = milliseconds
        alone = (0.0 if graph.of_unit(node) else self.milliseconds(node) for node in self.nodes)
        self._begins = [0.0, *accumulate(alone)]
        self._index = {node: index for index, node in enumerate(self.nodes)}

    def milliseconds(self, node: fx.Node) -> float:
        """Return the duration of a node alone."""
        return self._milliseconds(node) or 0.0

    def begin(self, node: fx.Node) -> float:
        """Return the start time of a node."""
        return self._begins[self._index[node]]

    def running(self, time: float, *, first: fx.Node, last: fx.Node) -> fx.Node:
        """Return the node that runs at a time, limited to a range of nodes."""
        index = bisect_right(self._begins, time) - 1
        return self.nodes[min(max(index, self._index[first]), self._index[last])]

    def behind(self, time: float, node: fx.Node) -> fx.Node:
        """Return the first node after another one that runs after a time, or the last of all."""
        index = max(bisect_left(self._begins, time), self._index[node] + 1)
        return self.nodes[min(index, len(self.nodes) - 1)]


def _group(collective: fx.Node) -> object:
    return collective.args[-1]
