"""Dispatch mode of a program's preparation, of which nothing is recorded.

Parallelizing a model makes a dozen small calls for each parameter. On the meta device they need no fake tensors, and on
the simulated device most calls are equal to earlier ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, Final

import torch

from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.operators.properties import ASKS_DEVICE, name_of, tensors, wraps
from legoai.cost.simulated.operators.results import Results
from legoai.runtime.torch_internals.fake_tensors import FakeTensor
from legoai.runtime.torch_internals.operators import DisableTorchDispatch, OpOverload, TorchDispatchMode

_EMPTY_LIKE: Final = torch.ops.aten.empty_like.default


class Preparation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that computes on the meta device without fake tensors, and looks up the outputs of other calls.

    Args:
        kernels: what decides the kernels of the simulated device; see :class:`Results`.
    """

    def __init__(self, kernels: Hashable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = Results(kernels)
        self._off = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let dynamo run with this mode on, as with :class:`~legoai.cost.simulated.dispatch.Dispatch`."""
        return False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """While entered, calls go to the fake tensor mode, as of what traces a graph."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(kind is not FakeTensor and wraps(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._off or func.namespace != "aten":
            return func(*args, **kwargs)
        if not types and _all_meta(args, kwargs):
            device = kwargs.get("device")
            if device is None or device.type == "meta":
                with DisableTorchDispatch():
                    return func(*args, **kwargs)
            if func is _EMPTY_LIKE and device.type == SIM and not kwargs.get("pin_memory"):
                with DisableTorchDispatch():
                    like = torch.empty_like(args[0], **{**kwargs, "device": args[0].device})
                return self.results.on_device(like, device)
        return self.results.of(func, name_of(func), args, kwargs)


def _all_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has tensors, and all of them are on the meta device."""
    found = list(tensors((args, tuple(kwargs.values()))))
    return bool(found) and all(item.is_meta for item in found)
