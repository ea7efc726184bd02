"""Operators that passes look for: functional collectives and their sums."""

from __future__ import annotations

from typing import Any, Final

import torch

from legoai.runtime.recomputation.policies import WAIT

__all__ = [
    "ADD",
    "CLONE",
    "GATHERS",
    "PAD",
    "SCATTERS",
    "SLICE",
    "SUM_OVER_REPLICAS",
    "WAIT",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "wait",
]

_FUNCTIONAL: Final[Any] = torch.ops._c10d_functional
_ATEN: Final[Any] = torch.ops.aten

GATHERS: Final = (_FUNCTIONAL.all_gather_into_tensor.default, _FUNCTIONAL.all_gather_into_tensor_out.default)
SCATTERS: Final = (_FUNCTIONAL.reduce_scatter_tensor.default,)
SUM_OVER_REPLICAS: Final = _FUNCTIONAL.all_reduce.default
ADD: Final = _ATEN.add.Tensor
SLICE: Final = _ATEN.slice.Tensor
CLONE: Final = _ATEN.clone.default
PAD: Final = _ATEN.constant_pad_nd.default

all_gather: Final = _FUNCTIONAL.all_gather_into_tensor
reduce_scatter: Final = _FUNCTIONAL.reduce_scatter_tensor
all_reduce: Final = _FUNCTIONAL.all_reduce
wait: Final = _FUNCTIONAL.wait_tensor
