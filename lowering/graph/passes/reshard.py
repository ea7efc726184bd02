"""Reshard after forward: parameters are gathered again where backward first reads them.

The parameters that forward gathers live until their last reader. A second all-gather before the first reader in
backward lets them end with forward, like selective checkpointing of the all-gather (Zhang et al. 2024, section 3.1).

    gather(w), forward(w) … backward(w)           ->  gather(w), forward(w) … gather(w), backward(w)

Where a unit reshards to fewer ranks than hold its shards, each of these slices its own part out of the parameter that
forward gathered, and backward gathers those parts.

    gather(w), forward(w) … backward(w)           ->  gather(w), forward(w), p = part(w) … gather(p), backward(w)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from legoai.lowering.graph.step.collectives import Unshard, in_order, unshards
from legoai.lowering.graph.step.operators import CLONE, SLICE
from legoai.lowering.graph.step.places import place_of, set_place
from legoai.lowering.graph.step.sharding import Among
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import shows


def reshard_after_forward(graph: StepGraph) -> None:
    """Gather the parameters of units that reshard after forward again for backward."""
    wanted = {name: unit.among for unit in graph.units if unit.reshard_after_forward for name in unit.parameters}
    place = in_order(graph)  # of nodes that are there now: what is inserted for one parameter is not read by another
    for unshard in list(unshards(graph)):
        if unshard.parameter in wanted:
            _gather_again(graph, unshard, wanted[unshard.parameter], place)


def _gather_again(graph: StepGraph, unshard: Unshard, among: Among | None, place: Mapping[fx.Node, int]) -> None:
    shown, readers = _seen_in_forward(unshard.wait)
    if not readers:
        return
    first = min(readers, key=place.__getitem__)
    again: dict[fx.Node, fx.Node] = {}
    copied_from: tuple[fx.Node, ...] = unshard.chain
    if among is not None:
        part = _part(graph, unshard.wait, shown, among, place)
        gather, copied_from = _gather_part(graph, part, unshard, among, before=first), (unshard.wait,)
        again[unshard.gather] = gather
    with graph.graph.inserting_before(first):
        for node in (*copied_from, *sorted(shown, key=place.__getitem__)):
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


def _part(
    graph: StepGraph, wait: fx.Node, shown: Sequence[fx.Node], among: Among, order: Mapping[fx.Node, int]
) -> fx.Node:
    """Copy this rank's part out of a gathered parameter, after its last reader in forward."""
    users = (user for node in (wait, *shown) for user in node.users)
    read = [user for user in users if (place := place_of(user)) is not None and place.phase == "forward"]
    last = max([wait, *read], key=order.__getitem__)
    whole, place = wait.meta["val"], place_of(wait)
    assert place is not None, "a node that was traced"
    rows = whole.shape[0] // among.ranks
    with graph.graph.inserting_after(last):
        cut = graph.graph.call_function(SLICE, (wait, 0, among.rank * rows, (among.rank + 1) * rows))
    with graph.graph.inserting_after(cut):
        part = graph.graph.call_function(CLONE, (cut,), {"memory_format": torch.contiguous_format})
    with whole.fake_mode:
        cut.meta["val"] = whole[:rows]
        part.meta["val"] = torch.empty_like(cut.meta["val"])
    for node in (cut, part):
        set_place(node, place._replace(makes="unsharded_parameter"))
    return part


def _gather_part(graph: StepGraph, part: fx.Node, unshard: Unshard, among: Among, *, before: fx.Node) -> fx.Node:
    """Gather a parameter from the parts that a group of ranks holds."""
    with graph.graph.inserting_before(before):
        gather = graph.graph.call_function(unshard.gather.target, (part, among.ranks, among.group))  # type: ignore[arg-type]
    gather.meta["val"], place = unshard.gather.meta["val"], place_of(unshard.gather)
    assert place is not None, "a node that was traced"
    set_place(gather, place._replace(phase="backward"))
    return gather


def _seen_in_forward(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes of forward that view a gathered parameter, and those after forward that read any of them."""
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
    """Erase a dead node, and then the nodes that only it has read."""
    sources = node.all_input_nodes
    graph.graph.erase_node(node)
    for source in sources:
        if not source.users and shows(source):
            _erase_unread(graph, source)
