"""Memory of a step's graph: owners of memory, and the bytes that are alive while each node runs.

Counted is what the interpreter holds: a value lives from its node to its last reader. Memory used inside a kernel is
not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx

from legoai.lowering.graph.passes.keep import kept_values
from legoai.lowering.graph.step.collectives import in_order
from legoai.lowering.graph.step.operators import WAIT
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import changes, is_part, shows
from legoai.runtime.offloading.host_copies import HostCopies
from legoai.runtime.offloading.state_copies import StateCopies
from legoai.specs.allocator import BLOCK, round_block


def roots(graph: StepGraph) -> dict[fx.Node, fx.Node]:
    """Return, for each node, the node that owns its memory; itself, if it allocates its own."""
    return roots_in(graph.graph)


def roots_in(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the result of :func:`roots` for any graph."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = source_of(node)
        found[node] = node if source is None else found[source]
    return found


def source_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a node views or changes; None where it allocates its own."""
    if node.op != "call_function":
        return None
    if shows(node):
        source = node.all_input_nodes[0]
        return None if is_part(node) and not shows(source) else source
    if getattr(node.target, "__name__", "") == HostCopies.wait_on_device.__name__:
        return node.all_input_nodes[0]
    given = node.kwargs.get("out")
    return given if isinstance(given, fx.Node) else next(iter(changes(node)), None)


class Life(NamedTuple):
    """Lifetime of memory: the indices of its first and last node, and its bytes."""

    first: int
    last: int
    bytes: int


def memory_curve(graph: StepGraph, *, throughout: Collection[fx.Node] = ()) -> list[int]:
    """Return the bytes of all values that are alive while each node runs, except the graph's inputs.

    Args:
        graph: of the step.
        throughout: nodes whose values are alive before or after the graph.
    """
    waited, found = _with_waits(graph), _lives(graph)
    always = {waited[node] for node in throughout}
    difference = [0] * (len(graph.graph.nodes) + 1)
    for root, (first, last, size) in found.items():
        difference[0 if root in always else first] += size
        difference[-1 if root in always else last + 1] -= size
    return list(accumulate(difference[:-1]))


def lives(graph: StepGraph) -> dict[fx.Node, Life]:
    """Return the lifetime of each node's memory, except the graph's inputs."""
    found = _lives(graph)
    return {node: found[root] for node, root in _with_waits(graph).items() if root in found}


def _lives(graph: StepGraph) -> dict[fx.Node, Life]:
    """Return the lifetime of the memory that each root allocates."""
    waited, place = _with_waits(graph), in_order(graph)
    last: dict[fx.Node, int] = {}
    found = {}
    for node, root in waited.items():
        last[root] = max([last.get(root, place[node]), *(place[user] for user in node.users)])
    for root, end in last.items():
        if root.op in ("placeholder", "output"):
            continue
        begin = place[root]
        if is_part(root):  # its source allocates it
            begin = place[root.all_input_nodes[0]]
        found[root] = Life(begin, end, bytes_of(root.meta.get("val")))
    return found


def _with_waits(graph: StepGraph) -> dict[fx.Node, fx.Node]:
    """Return the roots, where a wait has the root of its collective."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        source = node.args[0] if node.target is WAIT else source_of(node)
        found[node] = node if source is None else found[source]
    return found


def bytes_of(value: Any) -> int:
    """Return the bytes of a node's own memory; unused results of several are freed at once."""
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return 0
    return round_block(value.untyped_storage().nbytes())


def state_bytes(graph: StepGraph, moments: int) -> dict[str, int]:
    """Return the bytes of the optimizer's state of each trained parameter, with ``moments`` values per element."""
    return {name: moments * size for name, size in _trained_bytes(graph).items()}


def _trained_bytes(graph: StepGraph) -> dict[str, int]:
    """Return the bytes of the shard of each trained parameter, and of its gradient."""
    shards = graph.inputs()
    return {name: bytes_of(shards[name].meta["val"]) for name in graph.trained}


def held_without_state(graph: StepGraph) -> list[int]:
    """Return the bytes that are alive while each node runs, in the micro batch with most, except the optimizer's state.

    Measured memory beyond values is included: that of a node, or of the last measured node before it.
    """
    given, _ = kept_values(graph)
    inputs = sum(bytes_of(node.meta.get("val")) for node in graph.graph.find_nodes(op="placeholder"))
    gradients = 0
    if graph.micro_batches > 1:  # gradients of the micro batches before
        gradients = sum(_trained_bytes(graph).values())
    numbers = BLOCK * (1 + len(graph.trained))  # the sum of losses, and the count of steps of each parameter
    throughout = given if graph.micro_batches > 1 else ()
    curve = memory_curve(graph, throughout=throughout)
    return [
        inputs + gradients + numbers + held + more for held, more in zip(curve, _measured_beyond(graph), strict=True)
    ]


def _measured_beyond(graph: StepGraph) -> Iterator[int]:
    more = 0
    for node in graph.graph.nodes:
        more = graph.beyond.get(node.name, more)
        yield more


def held(graph: StepGraph, moments: int) -> list[int]:
    """Return the bytes that are alive while each node runs, with the optimizer's state that is not offloaded then."""
    sizes, found = state_bytes(graph, moments), []
    resident = sum(sizes.values())
    for node, beside in zip(graph.graph.nodes, held_without_state(graph), strict=True):
        name = getattr(node.target, "__name__", "")
        if name == StateCopies.state_to_device.__name__:
            resident += sizes[node.args[0]]
        found.append(beside + resident)
        if name == StateCopies.free_state.__name__:
            resident -= sizes[node.args[0]]
    return found
