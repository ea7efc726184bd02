"""Construction of a model on the meta device without drawing random values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from legoai.specs.models.first_values import move_to_meta
from legoai.specs.models.torch_internals import meta_device

_FILLS: Final = frozenset(
    {
        torch.Tensor.fill_,
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
        torch.Tensor.zero_,
        nn.init.constant_,
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.ones_,
        nn.init.trunc_normal_,
        nn.init.uniform_,
        nn.init.xavier_normal_,
        nn.init.xavier_uniform_,
        nn.init.zeros_,
    }
)


def built_unfilled(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model wholly on the meta device, without initialising it."""
    with meta_device(), _Unfilled():
        model = build()
    move_to_meta(model)
    return model


class _Unfilled(TorchFunctionMode):
    """Skips the initialisation of parameters, which has no effect on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return a tensor unfilled instead of filling it."""
        if func in _FILLS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))
