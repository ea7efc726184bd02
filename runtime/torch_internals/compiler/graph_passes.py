"""Private names of torch's tracer and of what it records, for graph passes.

Tried on torch 2.13.0.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

# The tracer below autograd, which sees the collectives of DTensors; and the graph that it fills.
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx

# Symbols for data-dependent sizes.
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "CAST",
    "UNSAFE_VIEW",
    "ShapeEnv",
    "disable_proxy_modes_tracing",
    "get_proxy_mode",
    "make_fx",
    "rename",
]

_ATEN: Final[Any] = torch.ops.aten

# Operators that the tracer records for casts, and for products on views of another shape.
CAST: Final = _ATEN._to_copy.default
UNSAFE_VIEW: Final = _ATEN._unsafe_view.default


def rename(node: fx.Node, name: str) -> None:
    """Give a node of a graph a name, or the next free one like it."""
    node._rename(name)
