"""Activation policy: backward reads values that forward saves, instead of recomputing them.

The trace marks what a checkpointed module saves (:mod:`~legoai.lowering.graph.step.checkpointed`).

    a = mm(x) … a' = mm(x'), backward(a')         ->  a = mm(x) … backward(a)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from legoai.lowering.graph.step.checkpointed import Mark, mark_of
from legoai.lowering.graph.step.operators import WAIT
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import changes, shown_by, shows
from legoai.runtime.recomputation.policies import is_collective
from legoai.runtime.torch_internals.operators import OpOverload


class ChangedInPlaceError(ValueError):
    """A value is to be saved, and a later node changes it."""


def keep_activations(graph: StepGraph) -> None:
    """Let backward read what forward saves, and erase recomputation that becomes dead.

    Raises:
        ChangedInPlaceError: a saved value is changed later.
    """
    forward: dict[Mark, fx.Node] = {}
    again: list[tuple[Mark, fx.Node]] = []
    for node in graph.graph.nodes:
        mark = mark_of(node)
        if mark is not None and is_recomputed(node):
            again.append((mark, node))
        elif mark is not None:
            forward[mark] = node
    kept: dict[fx.Node, fx.Node] = {}
    for mark, node in again:
        kept[node] = forward[mark] if mark in forward else _in_forward(graph, node, kept)
        assert kept[node].target == node.target, "recomputation does what forward did"
        node.replace_all_uses_with(kept[node])
    for node in kept.values():
        _wait_once(node)
    for node in reversed(list(graph.graph.nodes)):
        if is_recomputed(node) and not node.users and not _acts(node, kept):
            graph.graph.erase_node(node)
    _check(graph, kept.values())


def is_recomputed(node: fx.Node) -> bool:
    """Whether a node recomputes a value of forward."""
    place = place_of(node)
    return place is not None and place.phase == "recompute"


def _in_forward(graph: StepGraph, node: fx.Node, kept: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Return the item of forward's outputs that corresponds to an item which only recomputation uses."""
    [source] = node.all_input_nodes
    assert shows(node) and source in kept.values(), "only backward reads it"
    with graph.graph.inserting_after(source):
        made = graph.graph.node_copy(node)
    made.meta = {**source.meta, "val": node.meta["val"]}
    return made


def _wait_once(node: fx.Node) -> None:
    """Let recomputation's waits for a saved collective reuse forward's wait."""
    waits = [user for user in node.users if user.target is WAIT]
    first = next((wait for wait in waits if not is_recomputed(wait)), None)
    if first is not None:
        for wait in waits:
            if is_recomputed(wait):
                wait.replace_all_uses_with(first)


def _acts(node: fx.Node, kept: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether a node has effects besides its value.

    The set of saved values is the same on all ranks, so that all of them leave out the same collectives. Whether the
    result of another collective is used may differ between ranks.
    """
    if node in kept or (node.target is WAIT and node.args[0] in kept.values()):
        return False
    return (
        bool(changes(node))
        or node.target is WAIT
        or (isinstance(node.target, OpOverload) and is_collective(node.target))
    )


def _check(graph: StepGraph, kept: Any) -> None:
    """Check that no saved value is changed, directly or through a view."""
    memory = {shown_by(node) for node in kept}
    for node in graph.graph.nodes:
        for value in changes(node):
            if shown_by(value) in memory:
                raise ChangedInPlaceError(
                    f"`{node.name}` changes `{value.name}` in place, which is kept for the backward pass"
                )
