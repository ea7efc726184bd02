"""Operators that passes look for: functional collectives, casts and views."""

from __future__ import annotations

from typing import Any, Final

import torch

_FUNCTIONAL: Final[Any] = torch.ops._c10d_functional
_ATEN: Final[Any] = torch.ops.aten

GATHERS: Final = (_FUNCTIONAL.all_gather_into_tensor.default, _FUNCTIONAL.all_gather_into_tensor_out.default)
SCATTERS: Final = (_FUNCTIONAL.reduce_scatter_tensor.default,)
WAIT: Final = _FUNCTIONAL.wait_tensor.default
ADD: Final = _ATEN.add.Tensor
CAST: Final = _ATEN._to_copy.default
UNSAFE_VIEW: Final = _ATEN._unsafe_view.default
