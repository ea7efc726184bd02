"""Private names of torch's tracer and of inductor's passes over collectives, which rewrite the graph of a step.

Tried on torch 2.13.0. Imported only where the step of a program is traced: the passes import inductor, which takes
seconds.

Inductor's `manual_overlap_bucketing` merges collectives and moves them at once; it knows forward and backward graphs
apart, not one graph of both, and on a machine without triton it fails. Here are the functions by which it merges.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

# Merge collectives into one with a flat buffer, and register the operators that fill it.
from torch._inductor.fx_passes.bucketing import merge_all_gather_bucket, merge_reduce_scatter_bucket

# The tracer below autograd, which sees the collectives of DTensors; and the graph that it fills.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

__all__ = [
    "CAST",
    "UNSAFE_VIEW",
    "get_proxy_mode",
    "make_fx",
    "merge_all_gather_bucket",
    "merge_reduce_scatter_bucket",
    "rename",
]

_ATEN: Final[Any] = torch.ops.aten

# What the tracer records where a tensor is cast, and where a product is shown in another shape.
CAST: Final = _ATEN._to_copy.default
UNSAFE_VIEW: Final = _ATEN._unsafe_view.default


def rename(node: fx.Node, name: str) -> None:
    """Give a node of a graph a name, or the next one like it that is free."""
    node._rename(name)
