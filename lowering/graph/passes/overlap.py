"""Reordering: a bucket is communicated while another one is computed (Zhang et al. 2024, section 3.2.2).

    forward     wait 1, compute 1, gather 2, wait 2     ->  gather 2, wait 1, compute 1, wait 2
    backward    wait 2, compute 2, gather 1, wait 1     ->  wait 2, gather 1, compute 2, wait 1
                scatter 2, wait, scatter 1, wait        ->  scatter 2, …, wait, scatter 1
    replicas    sum 2, wait, sum 1, wait                ->  sum 2, …, wait, sum 1

In backward an all-gather starts after the preceding wait, since the copies out of the buffer there overlap with the
reduction. The first all-gather of backward starts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from legoai.lowering.graph.step.collectives import in_order
from legoai.lowering.graph.step.operators import GATHERS, SCATTERS, SUM_OVER_REPLICAS, WAIT
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import shows
from legoai.runtime.torch_internals.compiler.graph_passes import CAST
from legoai.runtime.torch_internals.operators import OpOverload


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective's nodes, in order.

    Attributes:
        start: the nodes that fill its buffer and issue it.
        wait: the wait, and the nodes that view or cast its result.
    """

    start: tuple[fx.Node, ...]
    wait: tuple[fx.Node, ...]


def overlap_communication(graph: StepGraph) -> None:
    """Start each all-gather one bucket ahead, and wait for each reduction when the next one starts."""
    forward, backward = gathers_of(graph)
    for before, after in pairwise(forward):
        move(after.start, before.wait[0])
    if backward:
        move(backward[0].start, begin_of_backward(graph))
    for before, after in pairwise(backward):
        move(after.start, before.wait[0].next)
    for kind in (SCATTERS, (SUM_OVER_REPLICAS,)):
        for before, after in pairwise(reductions_of(graph, kind)):
            move(before.wait, after.start[-1])


def move(nodes: Sequence[fx.Node], before: fx.Node) -> None:
    """Move nodes before another one, in order."""
    for node in nodes:
        before.prepend(node)


def begin_of_backward(graph: StepGraph) -> fx.Node:
    """Return the first node of backward; the output, where a stage has none."""
    nodes: list[fx.Node] = list(graph.graph.nodes)
    of_backward = (node for node in nodes if (place := place_of(node)) is not None and place.phase == "backward")
    return next(of_backward, graph.graph.output_node())


def gathers_of(graph: StepGraph) -> tuple[list[Collective], list[Collective]]:
    """Return the all-gathers of forward and those after it, each in the order of their waits."""
    forward: list[Collective] = []
    backward: list[Collective] = []
    order = in_order(graph)
    for wait in graph.graph.nodes:
        if wait.target is WAIT and wait.args[0].target in GATHERS and graph.of_unit(wait.args[0]):
            place = place_of(wait)
            assert place is not None, "a node that was traced"
            start = _before(wait.args[0], order)
            (forward if place.phase == "forward" else backward).append(Collective(start, (wait,)))
    return forward, backward


def reductions_of(graph: StepGraph, kind: Sequence[OpOverload]) -> list[Collective]:
    """Return reductions in order; those over replicas begin when their scattered buffer is available."""
    found = []
    for wait in graph.graph.nodes:
        if wait.target is WAIT and wait.args[0].target in kind and graph.of_unit(wait.args[0]):
            found.append(Collective((wait.args[0],), tuple(_behind(wait))))
    return found


def _before(gather: fx.Node, place: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """Return an all-gather with all nodes that it needs, except parameters and what forward leaves for backward."""
    found: set[fx.Node] = set()
    left, of_forward = [gather], _is_of_forward(gather)
    while left:
        node = left.pop()
        if node.op != "placeholder" and node not in found and _is_of_forward(node) is of_forward:
            found.add(node)
            left += node.all_input_nodes
    return tuple(sorted(found, key=place.__getitem__))


def _is_of_forward(node: fx.Node) -> bool:
    place = place_of(node)
    return place is not None and place.phase == "forward"


def _behind(wait: fx.Node) -> list[fx.Node]:
    """Return a wait with the nodes that view its result, cast it or begin to reduce it over replicas."""
    found = [wait]
    for node in found:
        found += [
            user
            for user in node.users
            if (shows(user) or user.target in (CAST, SUM_OVER_REPLICAS)) and user not in found
        ]
    return found
