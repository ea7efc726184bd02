"""Inductor's functions that merge collectives of a graph into one with a flat buffer.

Tried on torch 2.13.0. Importing them registers the operators that fill the buffer, and takes seconds, since it imports
inductor: only what merges imports this module, when it does.

Inductor's `manual_overlap_bucketing` merges collectives and moves them at once; it knows forward and backward graphs
apart, not one graph of both, and on a machine without triton it fails. Here are the functions by which it merges.

What fills the buffer of a reduction there takes gradients in the dtype of the buffer. FSDP2 casts them with the kernel
that fills it; here is an operator of that kernel.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._inductor.fx_passes.bucketing import merge_all_gather_bucket, merge_reduce_scatter_bucket

__all__ = ["FILL", "FILL_AND_CAST", "merge_all_gather_bucket", "merge_reduce_scatter_bucket"]

_BUCKETING: Final[Any] = torch.ops.bucketing

FILL: Final = _BUCKETING._pre_bucket_reduce_scatter.default
"""What fills the buffer of a reduction with gradients of its dtype."""


@torch.library.custom_op("legoai::_pre_bucket_reduce_scatter", mutates_args=())
def _fill_and_cast(gradients: list[torch.Tensor], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """Fill the buffer of a reduction, each rank's part of every gradient behind the other, and cast meanwhile.

    Args:
        gradients: of one dtype, whose first dimension the ranks divide.
        ranks: that reduce.
        dtype: of the buffer.
    """
    buffer: torch.Tensor = _buffer(gradients, ranks, dtype)
    torch._chunk_cat(gradients, 0, ranks, out=buffer.view(ranks, -1))
    return buffer


@_fill_and_cast.register_fake
def _buffer(gradients: list[torch.Tensor], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return gradients[0].new_empty(sum(gradient.numel() for gradient in gradients), dtype=dtype)


_LEGOAI: Final[Any] = torch.ops.legoai

FILL_AND_CAST: Final = _LEGOAI._pre_bucket_reduce_scatter.default
"""What fills it with gradients of another one, and takes the ranks and the dtype behind them."""
