"""Proactive prefetching: all-gathers start as early as memory limits allow (Tanaka et al. 2025, section 4.2).

    forward     gather 2, wait 1, compute 1, gather 3, wait 2   ->  gather 2, gather 3, wait 1, compute 1, wait 2

While a unit computes, the buffers that are gathered ahead for later units take at most the limit of a prefetch group in
Algorithm 1. By the memory curve of the graph, they never raise device memory above its limit: what is offloaded has
left before, so that its room is used and no more. All-gathers keep their order. Fusion is decided before, by the plan's
buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import fx

from legoai.lowering.graph.passes.memory import held
from legoai.lowering.graph.passes.overlap import Collective, begin_of_backward, gathers_of, move
from legoai.lowering.graph.step.collectives import in_order
from legoai.lowering.graph.step.step_graph import StepGraph


class Room:
    """Memory left while each node of a graph runs, as all-gathers are moved ahead.

    Args:
        graph: before all-gathers are moved.
        memory: of the device; None for no limit.
        moments: values per element of a parameter that the optimizer keeps on the device.
    """

    def __init__(self, graph: StepGraph, memory: int | None, moments: int) -> None:
        self._memory = memory
        self._place = in_order(graph)
        self._held = [] if memory is None else held(graph, moments)

    def take(self, gather: Collective, anchors: Sequence[fx.Node], units: range) -> int:
        """Return the first unit with which an all-gather can start, and reserve the room for its buffer.

        Args:
            gather: to be started early.
            anchors: the node before which it would start, by unit, in the order of the units.
            units: from the first that its own limit allows, to the last.
        """
        if self._memory is None:
            return units[0]
        start, size = self._place[gather.start[-1]], _size(gather)
        begin, most = start, self._memory - size
        while begin > self._place[anchors[0]] and self._held[begin - 1] <= most:
            begin -= 1
        unit, anchor = next(
            (pair for pair in zip(units, anchors, strict=True) if self._place[pair[1]] >= begin),
            (units[-1], gather.start[-1]),
        )
        for place in range(self._place[anchor], start):
            self._held[place] += size
        return unit


def prefetch_proactively(graph: StepGraph, *, limit: int, memory: int | None = None, moments: int = 0) -> None:
    """Start each all-gather as early as the limits allow, of forward within forward and of backward within backward.

    Args:
        graph: whose all-gathers start one bucket ahead.
        limit: bytes of the buffers that are gathered ahead while a unit computes; a larger one is not gathered ahead.
        memory: of the device, which no all-gather moved to an earlier start may exceed; None for no limit.
        moments: values per element of a parameter that the optimizer keeps on the device.
    """
    forward, backward = gathers_of(graph)
    room = Room(graph, memory, moments)
    starts = set(chain.from_iterable(gather.start for gather in (*forward, *backward)))
    _start_ahead(forward, [gather.wait[0] for gather in forward], limit, room, first=0)
    if backward:
        anchors = [_but(begin_of_backward(graph), starts)]
        for gather in backward[:-1]:
            anchors.append(_but(gather.wait[0].next, starts))
        _start_ahead(backward, anchors, limit, room, first=-1)


def _start_ahead(
    gathers: Sequence[Collective], anchors: Sequence[fx.Node], limit: int, room: Room, *, first: int
) -> None:
    """Start all-gathers with the units of their anchors, beginning with the first; the last one starts by itself."""
    chosen: list[int] = []
    earliest = units_ahead([_size(gather) for gather in gathers], limit, first=first)
    for index, gather in enumerate(gathers):
        units = range(max([earliest[index], *chosen[-1:]]), index + 1)
        places = [gather.wait[0] if unit == index else anchors[unit - first] for unit in units]
        chosen.append(room.take(gather, places, units))
    for gather, index, unit in zip(gathers, range(len(gathers)), chosen, strict=True):
        move(gather.start, gather.wait[0] if unit == index else anchors[unit - first])


def units_ahead(sizes: Sequence[int], limit: int, *, first: int) -> list[int]:
    """Return for each all-gather the index of the unit with which it starts: its own, or an earlier one.

    Args:
        sizes: bytes of the buffers of the units, in the order in which they compute.
        limit: of the buffers after a unit that are gathered before it computes.
        first: the earliest unit; -1 where something computes before the first.
    """
    found = []
    unit, ahead = first, 0
    for index, size in enumerate(sizes):
        if index > unit:
            ahead += size
        while ahead > limit:
            unit += 1
            ahead -= sizes[unit]
        found.append(unit)
    return found


def _size(gather: Collective) -> int:
    size: int = gather.start[-1].meta["val"].nbytes
    return size


def _but(node: fx.Node, moving: set[fx.Node]) -> fx.Node:
    """Return the first node from one on that is not moved."""
    while node in moving:
        node = node.next
    return node
