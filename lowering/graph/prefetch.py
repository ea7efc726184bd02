"""Proactive prefetching: gathers start as early as a bound on their memory allows (Tanaka et al. 2025, section 4.2).

    forward     gather 2, wait 1, compute 1, gather 3, wait 2   ->  gather 2, gather 3, wait 1, compute 1, wait 2

While a unit computes, the buffers that are gathered ahead for the units behind it take at most the limit: that of a
prefetch group in Algorithm 1. Gathers keep their order. What is fused is decided before, by the buckets of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import fx

from legoai.lowering.graph.overlap import Collective, begin_of_backward, gathers_of, move
from legoai.lowering.graph.step_graph import StepGraph


def prefetch_proactively(graph: StepGraph, *, limit: int) -> None:
    """Start each gather as early as the limit allows, of forward in forward and of backward in backward.

    Args:
        graph: whose gathers start one bucket ahead.
        limit: bytes of the buffers that are gathered ahead while a unit computes; a larger one is not gathered ahead.
    """
    forward, backward = gathers_of(graph)
    starts = set(chain.from_iterable(gather.start for gather in (*forward, *backward)))
    anchors = [gather.wait[0] for gather in forward]
    for gather, unit in zip(forward, units_ahead(_sizes(forward), limit, first=0), strict=True):
        move(gather.start, anchors[unit])
    if not backward:
        return
    anchors = [_but(begin_of_backward(graph), starts), *(_but(gather.wait[0].next, starts) for gather in backward)]
    for index, unit in enumerate(units_ahead(_sizes(backward), limit, first=-1)):
        gather = backward[index]
        move(gather.start, gather.wait[0] if unit == index else anchors[unit + 1])


def units_ahead(sizes: Sequence[int], limit: int, *, first: int) -> list[int]:
    """Return for each gather the unit with which it starts, by number: its own, or an earlier one.

    Args:
        sizes: bytes of the buffers of the units, in the order in which they compute.
        limit: of the buffers behind a unit that are gathered before it computes.
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


def _sizes(gathers: Sequence[Collective]) -> list[int]:
    return [gather.start[-1].meta["val"].nbytes for gather in gathers]


def _but(node: fx.Node, moving: set[fx.Node]) -> fx.Node:
    """Return the first node from one on that stays in its place."""
    while node in moving:
        node = node.next
    return node
