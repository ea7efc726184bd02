"""Dispatch mode that watches a real step without changing what autograd calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from legoai.runtime.torch_internals.operators import OpOverload, adds_gradients_in_place, called_from_python


class Watching(TorchDispatchMode):
    """Runs operators on plain tensors as if no mode were active, in which case autograd sums gradients in place."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # whose wrapper would be another frame above an operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if func is torch.ops.aten.add.Tensor and adds_gradients_in_place(args) and not called_from_python("support."):
            func = torch.ops.aten.add_.Tensor
        out = func(*args, **(kwargs or {}))
        self.saw(func, args, kwargs or {}, out)
        return out

    def saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note a call and its result."""
        raise NotImplementedError
