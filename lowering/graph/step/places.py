"""Places of a graph's nodes: the module for which each computes, and the phase of the step."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from legoai.lowering.graph.step.operators import GATHERS, SLICE
from legoai.lowering.graph.step.sharding import is_cast_for_sum, is_of_pass, is_of_unit
from legoai.runtime.initialize import plain_path
from legoai.runtime.torch_internals.compiler.graph_passes import get_proxy_mode
from legoai.runtime.torch_internals.operators import (
    OpOverload,
    TorchDispatchMode,
    autograd_sequence_number,
    current_autograd_node,
    running_backward,
)

Phase = Literal["forward", "recompute", "backward"]
Makes = Literal["", "unsharded_parameter", "unsharded_gradient", "communication", "activation", "optimizer_state"]

LOSS: Final = "loss"

_KEY: Final = "legoai"
"""The entry of `node.meta["custom"]`, which torch's passes propagate to the nodes that they create."""

_UNSHARDING: Final = (*GATHERS, SLICE)

_ACCUMULATION: Final = 2**64 - 1
"""Sequence number of every node that accumulates a gradient."""


class Place(NamedTuple):
    """Module and phase of a node, and the kind of its result.

    Attributes:
        module: its path; `""` for the model itself and what precedes it, `loss` for what follows it.
        phase: of the step.
        makes: kind of its result, where the phase does not determine it.
        of_unit: whether it belongs to the all-gathers of a unit's parameters or to the reductions of their gradients.
        of_pass: whether it runs once for all micro batches of a pipeline's pass, since it reads sums.
    """

    module: str
    phase: Phase
    makes: Makes = ""
    of_unit: bool = False
    of_pass: bool = False


def place_of(node: fx.Node) -> Place | None:
    """Return a node's place; None for placeholders, the output, and nodes that a pass has created from nothing."""
    place: Place | None = node.meta.get("custom", {}).get(_KEY)
    return place


def set_place(node: fx.Node, place: Place) -> None:
    """Give a node a place."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: place}


def holds(module: str, path: str) -> bool:
    """Whether computation for ``path`` belongs to a module; the loss belongs to the model."""
    return module in ("", path) or path.startswith(f"{module}.")


class Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each node that is traced while entered its place.

    Args:
        model: whose modules are called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths: Mapping[nn.Module, str] = {module: plain_path(path) for path, module in model.named_modules()}
        self._running: list[str] = []
        self._readings: dict[str, int] = {}
        self.reading = set[str]()
        """The modules for which the host reads values that determine shapes."""
        self._starts: list[int] = []
        self._started: list[str] = []
        self._of_gradient = ""
        self._outside = ""

    def next_reading(self) -> tuple[str, int]:
        """Return the running module, and how often the host has read values for it since it was called."""
        module = self._running[-1]
        self.reading.add(module)
        self._readings[module] += 1
        return module, self._readings[module]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Observe modules and operators while entered."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Trace an operator, and set the place of the traced nodes."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        tracing = get_proxy_mode()
        if tracing is None:  # shape propagation of DTensor, which is not part of the step
            return func(*args, **(kwargs or {}))
        graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)))
        result = func(*args, **(kwargs or {}))
        node, place = last.next, self._place()
        if is_of_unit():
            place = place._replace(makes="unsharded_parameter" if func in _UNSHARDING else place.makes, of_unit=True)
        if is_cast_for_sum():
            place = place._replace(makes="unsharded_gradient")
        if is_of_pass():
            place = place._replace(of_pass=True)
        while node.op != "root":
            set_place(node, place)
            node = node.next
        return result

    def _place(self) -> Place:
        if not running_backward():
            return Place(self._running[-1] if self._running else self._outside, "forward")
        if self._running:
            return Place(self._running[-1], "recompute")
        node = current_autograd_node()
        if node is not None and node._sequence_nr() != _ACCUMULATION:
            index = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
            if index >= 0:
                self._of_gradient = self._started[index]
        return Place(self._of_gradient, "backward")

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module in self._paths:
            self._running.append(self._paths[module])
            self._readings[self._paths[module]] = 0
            self._begin()

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if module in self._paths and self._running:
            self._running.pop()
            if not self._running and not running_backward():
                self._outside = LOSS
            self._begin()

    def _begin(self) -> None:
        self._starts.append(autograd_sequence_number())
        self._started.append(self._running[-1] if self._running else self._outside)
