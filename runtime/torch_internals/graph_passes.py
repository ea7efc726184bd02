"""Private names of torch's tracer, and what it records: for passes that rewrite the graph of a step.

Tried on torch 2.13.0.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

# The tracer below autograd, which sees the collectives of DTensors; and the graph that it fills.
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx

# Sizes that only values tell, as names.
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

# What the tracer records where a tensor is cast, and where a product is shown in another shape.
CAST: Final = _ATEN._to_copy.default
UNSAFE_VIEW: Final = _ATEN._unsafe_view.default


def rename(node: fx.Node, name: str) -> None:
    """Give a node of a graph a name, or the next one like it that is free."""
    node._rename(name)
