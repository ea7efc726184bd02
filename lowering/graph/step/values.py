"""Values of a graph's nodes: views, parts of several results, and changes in place."""

from __future__ import annotations

from torch import fx

from legoai.runtime.torch_internals.compiler.graph_passes import UNSAFE_VIEW
from legoai.runtime.torch_internals.operators import OpOverload


def shows(node: fx.Node) -> bool:
    """Whether a node is a view of its argument."""
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        return target.is_view or target is UNSAFE_VIEW
    return getattr(target, "__name__", "") == "getitem"


def shown_by(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a value."""
    while shows(node):
        node = node.all_input_nodes[0]
    return node


def is_part(node: fx.Node) -> bool:
    """Whether a node extracts one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


def changes(node: fx.Node) -> list[fx.Node]:
    """Return the values that a node changes in place."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    given = zip(node.target._schema.arguments, node.args, strict=False)
    return [
        value
        for parameter, value in given
        if parameter.alias_info is not None and parameter.alias_info.is_write and isinstance(value, fx.Node)
    ]
