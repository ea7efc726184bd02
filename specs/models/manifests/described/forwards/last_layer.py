"""Uses of the last layer's result by a forward that also returns it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from legoai.specs.models.manifests.described.recorders.functions import function_name, tensors_in

_ALIKE: Final = frozenset(["device", "dim", "get_device", "is_cuda", "is_floating_point", "len", "ndim", "ndimension"])
"""Functions that return of a layer's result what they return of its argument."""


def use_of_result(model: nn.Module, inputs: tuple[Any, ...], layer: nn.Linear) -> str:
    """Return what a forward does with a layer's result that it would not do with the layer's argument; "" if nothing.

    The forward runs once as in training, where gradients are computed, and once as in validation.

    Args:
        model: on the meta device; it returns the layer's result.
        inputs: of its forward.
        layer: one of its modules.

    Returns:
        A predicate of the forward, such as "calls `shape` of it".
    """
    with _Uses(layer) as uses:
        found = uses.of(model, inputs)
        if not found:
            with torch.no_grad(), _in_evaluation(model):
                found = uses.of(model, inputs)
                found = found and f"{found} in evaluation mode"
    return found


class _Uses(TorchFunctionMode):
    """Notes, while active, the functions of a layer's result."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._layer = layer
        self._handle: Any = None
        self._result: weakref.ref[torch.Tensor] | None = None
        self._made_by: Any = None
        self._found: list[str] = []

    def __enter__(self) -> _Uses:
        self._handle = self._layer.register_forward_hook(self._leave)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._handle.remove()

    def of(self, model: nn.Module, inputs: tuple[Any, ...]) -> str:
        """Run a forward, and return the first use of the layer's result other than to return it."""
        self._result, self._made_by, self._found = None, None, []
        returned = tensors_in(model(*inputs))
        noted, self._result = self._result, None
        if noted is None or len(returned) != 1 or returned[0] is not noted():
            return self._first("returns another result")
        # A function of autograd, such as a reentrant checkpoint, may return the tensor that it was given.
        if returned[0].grad_fn is not self._made_by:
            return self._first("calls it within a function of autograd")
        returned.clear()
        if noted() is not None:
            gc.collect()  # of a cycle
        return self._first("keeps it" if noted() is not None else "")

    def _first(self, last: str) -> str:
        return next(iter(self._found), last)

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> None:
        if self._result is not None:
            self._found.append("computes it more than once")
        self._made_by = result.grad_fn
        self._result = weakref.ref(result)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        kwargs = kwargs or {}
        result = None if self._result is None else self._result()
        if result is not None and any(tensor is result for tensor in tensors_in((args, kwargs))):
            name = function_name(func)
            if name not in _ALIKE:
                self._found.append(f"calls `{name}` of it")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
