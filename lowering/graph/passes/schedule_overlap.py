"""Communication schedule of torch's automatic scheduler, with operator times from the cost model.

    forward     gather a, wait, gather b, wait, compute    ->  gather (a, b), wait, gather c, compute, wait
    backward    compute, scatter a, wait, scatter b, wait  ->  compute, scatter (a, b), compute, wait

Forward and backward are scheduled separately, as if autograd had split them: a parameter that is gathered again for
backward is freed in between. The scheduler knows data dependencies, but no in-place changes. So ordering dependencies
around such changes are added while it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from torch import fx

from legoai.lowering.graph.passes.overlap import begin_of_backward
from legoai.lowering.graph.step.operators import GATHERS, WAIT
from legoai.lowering.graph.step.places import Makes, place_of, set_place
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import changes, shows
from legoai.runtime.recomputation.policies import is_collective
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.specs.units import MIB

Milliseconds = Callable[[fx.Node, int | None], float | None]
"""Time of a node, of a collective also with a given buffer size; None where it costs nothing."""

_BEHIND: Final = "behind"
"""The keyword argument of a node that holds its ordering dependencies."""
_TRACED: Final = "legoai_traced"
"""The entry of `node.meta` of nodes that the scheduler has not created."""

_LEAST: Final = 10
_MOST: Final = 500
_EFFICIENCY: Final = 0.9
"""Torch's limits of the megabytes of a bucket, and the share of the bandwidth at which a bucket counts as large."""


def schedule_overlap(graph: StepGraph, *, milliseconds: Milliseconds) -> None:
    """Merge and move collectives as torch's automatic scheduler does.

    Args:
        graph: whose parameters are gathered one by one.
        milliseconds: of its nodes; equal on all ranks, which would otherwise deadlock.
    """
    from legoai.runtime.torch_internals.compiler.overlap_scheduling import schedule

    megabytes = _large(graph, milliseconds)
    whole, taken = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = graph.graph.find_nodes(op="placeholder")
    for node in inputs:
        taken[node] = whole.node_copy(node)
    for nodes in _parts(graph):
        part, given, results = _part(graph, nodes)
        order_changes(part.graph)
        schedule(part, milliseconds, megabytes=megabytes)
        forget_order(part.graph)
        _settle(part.graph)
        found = dict(zip(part.graph.find_nodes(op="placeholder"), (taken[node] for node in given), strict=True))
        for node in part.graph.nodes:
            if node.op not in ("placeholder", "output"):
                found[node] = whole.node_copy(node, found.__getitem__)
        outputs: Sequence[fx.Node] = part.graph.output_node().args[0]  # type: ignore[assignment]
        taken.update((node, found[made]) for node, made in zip(results, outputs, strict=True))
    whole.output([taken[node] for node in graph.outputs()])
    graph.module.graph = whole


def _large(graph: StepGraph, milliseconds: Milliseconds) -> float:
    """Return the megabytes of an all-gather that uses most of its bandwidth, within torch's limits."""
    gather = next((node for node in graph.graph.nodes if node.target in GATHERS and graph.of_unit(node)), None)
    if gather is None:
        return _LEAST

    def rate(megabytes: float) -> float:
        return megabytes / (milliseconds(gather, int(megabytes * MIB)) or 1.0)

    size = float(_LEAST)
    while size < _MOST and rate(size) < _EFFICIENCY * rate(_MOST):
        size = min(1.25 * size, _MOST)
    return size


def _parts(graph: StepGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes of forward and those after it, in order."""
    forward, backward = list[fx.Node](), list[fx.Node]()
    begin, found = begin_of_backward(graph), forward
    for node in graph.graph.nodes:
        found = backward if node is begin else found
        if node.op not in ("placeholder", "output"):
            found.append(node)
    return forward, backward


def _part(graph: StepGraph, nodes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Return a part of a graph as a module, with its inputs and its results."""
    inside = set(nodes)
    read = {source for node in nodes for source in node.all_input_nodes}
    given = [node for node in graph.graph.nodes if node in read and node not in inside]
    outputs = set(graph.outputs())
    results = [node for node in nodes if node in outputs or any(user not in inside for user in node.users)]
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in given:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
        copies[node].meta[_TRACED] = True
    part.output([copies[node] for node in results])
    return fx.GraphModule(graph.module, part), given, results


def order_changes(graph: fx.Graph) -> None:
    """Order reads of memory after earlier changes of it, and changes after all earlier reads."""
    memory, changed = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    readers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        memory[node] = memory[node.all_input_nodes[0]] if shows(node) else node
        if node.op != "call_function" or shows(node):
            continue
        read, written = {memory[source] for source in node.all_input_nodes}, [memory[item] for item in changes(node)]
        before = [changed[storage] for storage in read if storage in changed]
        before += [reader for storage in written for reader in readers[storage]]
        _come_behind(node, dict.fromkeys(before))
        for storage in read:
            readers[storage].append(node)
        for storage in written:
            readers[storage], changed[storage] = [], node
        if written:
            memory[node] = written[0]


def _come_behind(node: fx.Node, before: Iterable[fx.Node]) -> None:
    others = tuple(item for item in before if item not in node.all_input_nodes)
    if others:
        assert not _communicates(node), "a collective reads no memory that is changed in place"
        node.kwargs = {**node.kwargs, _BEHIND: others}


def forget_order(graph: fx.Graph) -> None:
    """Remove the ordering dependencies that :func:`order_changes` has added."""
    for node in graph.nodes:
        if _BEHIND in node.kwargs:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != _BEHIND}


def _settle(graph: fx.Graph) -> None:
    """Set the kinds of new buckets' results: communication buffers up to the waits, and then parameters."""
    made = {node: place for node in graph.nodes if _TRACED not in node.meta and (place := place_of(node)) is not None}
    buffers = set(_buffers(list(made)))
    for node, place in made.items():
        gathers = place.makes == "unsharded_parameter"
        makes: Makes = "communication" if node in buffers else "unsharded_parameter" if gathers else ""
        set_place(node, place._replace(makes=makes))
    for node in graph.nodes:
        node.meta.pop(_TRACED, None)


def _buffers(made: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield collectives and waits, and the nodes that fill the buffers of collectives."""
    filling = set[fx.Node]()
    for node in reversed(made):
        if node.target is WAIT or _communicates(node) or any(user in filling for user in node.users):
            yield node
            if node.target is not WAIT:
                filling.add(node)


def _communicates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_collective(node.target)
