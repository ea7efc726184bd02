"""Checkpointed modules in the trace of a step: marks of the operators whose outputs the program's policy saves.

A checkpointed module is traced with all of its operators twice, in forward and in recomputation. During the trace the
policy is called for each operator as in torch's selective checkpointing, so that the same operators are saved as under
the eager backend.
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

from legoai.lowering.graph.step.routing import is_reading
from legoai.lowering.graph.step.sharding import gathered_before, is_of_unit
from legoai.runtime.recomputation.policies import Contexts, Policy
from legoai.runtime.torch_internals.compiler.graph_passes import disable_proxy_modes_tracing, get_proxy_mode
from legoai.runtime.torch_internals.operators import OpOverload, TorchDispatchMode

_KEY: Final = "legoai_kept"
"""The entry of `node.meta["custom"]`."""


class Mark(NamedTuple):
    """Mark of an operator whose output is saved; the nodes of forward and of recomputation have equal marks."""

    call: int
    """Of a checkpointed module."""
    operator: OpOverload
    invocation: int
    node: int
    """Of those that this invocation of the operator has made."""


def mark_of(node: fx.Node) -> Mark | None:
    """Return the mark of a node; None where its output is not saved."""
    mark: Mark | None = node.meta.get("custom", {}).get(_KEY)
    return mark


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
                mark = Mark(self._call, func, invocation, index)
                node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: mark}
        return output


def _behind(last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node.op != "root":
        yield node
        node = node.next
