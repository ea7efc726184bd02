"""Reshard after forward: parameters are gathered again where backward first reads them.

What forward has gathered lives until its last reader. A second gather in front of the first reader in backward lets it
end with forward, as selective checkpointing of the gather does (Zhang et al. 2024, section 3.1).

    gather(w), forward(w) … backward(w)           ->  gather(w), forward(w) … gather(w), backward(w)
"""

from __future__ import annotations

from torch import fx

from legoai.lowering.graph.collectives import Unshard, in_order, shows, unshards
from legoai.lowering.graph.places import place_of, set_place
from legoai.lowering.graph.step_graph import StepGraph


def reshard_after_forward(graph: StepGraph) -> None:
    """Gather the parameters of units that reshard after forward again for backward."""
    wanted = {name for unit in graph.units if unit.reshard_after_forward for name in unit.parameters}
    for unshard in list(unshards(graph)):
        if unshard.parameter in wanted:
            _gather_again(graph, unshard)


def _gather_again(graph: StepGraph, unshard: Unshard) -> None:
    shown, readers = _seen_in_forward(unshard.wait)
    if not readers:
        return
    place = in_order(graph)
    first = min(readers, key=place.__getitem__)
    again: dict[fx.Node, fx.Node] = {}
    with graph.graph.inserting_before(first):
        for node in (*unshard.chain, *sorted(shown, key=place.__getitem__)):
            copied = graph.graph.node_copy(node, lambda source: again.get(source, source))
            was = place_of(node)
            assert was is not None, "a node that was traced"
            set_place(copied, was._replace(phase="backward"))
            again[node] = copied
    for reader in readers:
        for source in (*shown, unshard.wait):
            reader.replace_input_with(source, again[source])
    for node in reversed([node for node in again.values() if not node.users]):
        _erase_unread(graph, node)


def _seen_in_forward(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes of forward that show a gathered parameter, and those behind forward that read any of them."""
    shown: list[fx.Node] = []
    readers: dict[fx.Node, None] = {}
    left = [wait]
    while left:
        for user in left.pop().users:
            place = place_of(user)
            if place is None or place.phase != "forward":
                readers[user] = None
            elif shows(user) and user not in shown:
                shown.append(user)
                left.append(user)
    return shown, list(readers)


def _erase_unread(graph: StepGraph, node: fx.Node) -> None:
    """Erase a node that nobody reads, and then those that only it has read."""
    sources = node.all_input_nodes
    graph.graph.erase_node(node)
    for source in sources:
        if not source.users and shows(source):
            _erase_unread(graph, source)
