"""Activation policy: backward reads values that forward saves, instead of recomputing them.

A checkpointed module is traced with all of its operators twice, in forward and in recomputation. During the trace the
program's policy is called for each operator as in torch's selective checkpointing, so that the same operators are saved
as under the eager backend.

    a = mm(x) … a' = mm(x'), backward(a')         ->  a = mm(x) … backward(a)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from legoai.lowering.graph.collectives import shows
from legoai.lowering.graph.operators import WAIT
from legoai.lowering.graph.places import place_of
from legoai.lowering.graph.routing import is_reading
from legoai.lowering.graph.sharding import gathered_before, is_of_unit
from legoai.lowering.graph.step_graph import StepGraph
from legoai.runtime.activation import Contexts, Policy, is_collective
from legoai.runtime.torch_internals.graph_passes import disable_proxy_modes_tracing, get_proxy_mode
from legoai.runtime.torch_internals.operators import OpOverload, TorchDispatchMode

_KEY: Final = "legoai_kept"
"""The entry of `node.meta["custom"]`."""


class ChangedInPlaceError(ValueError):
    """A value is to be saved, and a later node changes it."""


class _Mark(NamedTuple):
    """Mark of an operator whose output is saved; the nodes of forward and of recomputation have equal marks."""

    call: int
    """Of a checkpointed module."""
    operator: OpOverload
    invocation: int
    node: int
    """Of those that this invocation of the operator has made."""


class KeptOutputs:
    """Notes about checkpointed modules while a step is traced."""

    def __init__(self) -> None:
        self._calls = itertools.count()

    def contexts(self, policy: Policy) -> Contexts:
        """Return dispatch modes that mark what forward saves, and what recomputation computes unnecessarily."""
        call, kept = next(self._calls), set[tuple[OpOverload, int]]()
        return _Marking(call, kept, policy), _Marking(call, kept, None)

    @contextmanager
    def measured(self, module: nn.Module) -> Iterator[Sequence[torch.Tensor]]:
        """Run a module untraced, with its parameters gathered before, as units of the eager backend do."""
        with disable_proxy_modes_tracing(), gathered_before(module) as parameters:
            yield parameters


class _Marking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the nodes of operators whose outputs are saved, except all-gathers of parameters."""

    supports_higher_order_operators = True

    def __init__(self, call: int, kept: set[tuple[OpOverload, int]], policy: Policy | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call
        self._kept = kept
        self._policy = policy
        self._invocations: Counter[OpOverload] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Trace an operator."""
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS or is_of_unit() or is_reading():
            return func(*args, **kwargs)
        tracing = get_proxy_mode()
        assert tracing is not None, "modules are measured before"
        last = next(iter(reversed(tracing.tracer.graph.nodes)))
        output = func(*args, **kwargs)
        invocation = self._invocations[func]
        self._invocations[func] += 1
        if self._policy is not None and self._policy(None, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE:
            self._kept.add((func, invocation))
        if (func, invocation) in self._kept:
            for index, node in enumerate(_behind(last)):
                mark = _Mark(self._call, func, invocation, index)
                node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: mark}
        return output


def _behind(last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


def keep_activations(graph: StepGraph) -> None:
    """Let backward read what forward saves, and erase recomputation that becomes dead.

    Raises:
        ChangedInPlaceError: a saved value is changed later.
    """
    forward: dict[_Mark, fx.Node] = {}
    again: list[tuple[_Mark, fx.Node]] = []
    for node in graph.graph.nodes:
        mark = node.meta.get("custom", {}).get(_KEY)
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


def _check(graph: StepGraph, kept: Any) -> None:
    """Check that no saved value is changed, directly or through a view."""
    memory = {shown_by(node) for node in kept}
    for node in graph.graph.nodes:
        for value in changes(node):
            if shown_by(value) in memory:
                raise ChangedInPlaceError(
                    f"`{node.name}` changes `{value.name}` in place, which is kept for the backward pass"
                )


def shown_by(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a value."""
    while shows(node):
        node = node.all_input_nodes[0]
    return node
