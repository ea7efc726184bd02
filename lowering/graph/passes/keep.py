"""Parameters that stay unsharded from one micro batch of a step to the next (Tanaka et al. 2025, section 4.3).

    micro batch 1      gather(w), forward(w), backward(w)   ->  gather(w), forward(w), backward(w), w
    micro batch 2      gather(w), forward(w), backward(w)   ->  w, forward(w), backward(w)

The first micro batch returns what it has gathered, and the others take it as input. The optimizer changes the shards,
so each step gathers again. The plan states which units stay unsharded, by hand or by `legoai solve`.
"""

from __future__ import annotations

from itertools import chain

from torch import fx

from legoai.lowering.graph.passes.overlap import gathers_of
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.step_graph import StepGraph


def keep_unsharded(graph: StepGraph) -> None:
    """Let later micro batches reuse the gathered parameters of units that do not reshard after backward."""
    graph.keep(*kept_values(graph))


def kept_values(graph: StepGraph) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the nodes of gathered parameters that stay, and the nodes that later micro batches do not need."""
    wanted = {name for unit in graph.units if not unit.reshard_after_backward for name in unit.parameters}
    shards = {node for name, node in graph.inputs().items() if name in wanted}
    erased: set[fx.Node] = set()
    for gather in chain.from_iterable(gathers_of(graph)):
        if any(source in shards for node in gather.start for source in node.all_input_nodes):
            erased |= {*gather.start, *made_of(gather.wait[0])}
    given = [node for node in graph.graph.nodes if node in erased and any(user not in erased for user in node.users)]
    return given, erased


def made_of(wait: fx.Node) -> set[fx.Node]:
    """Return a wait with the nodes that extract the gathered parameters from its buffer."""
    found: set[fx.Node] = set()
    left = [wait]
    while left:
        node = left.pop()
        place = place_of(node)
        if place is not None and place.makes and node not in found:
            found.add(node)
            left += node.users
    return found
