"""Inductor's functions that merge collectives of a graph into one with a flat buffer.

Tried on torch 2.13.0. Importing them registers the operators that fill the buffer, and takes seconds, since it imports
inductor: only passes that merge import this module, when they run.

Inductor's `manual_overlap_bucketing` merges collectives and moves them at once; it supports separate forward and
backward graphs, not one graph of both, and fails on a machine without triton. Here are the functions by which it
merges.

Its operator that fills the buffer of a reduction takes gradients in the dtype of the buffer, whose rows the ranks
divide. FSDP2 casts and pads them in the kernel that fills the buffer; an operator for that kernel is defined here.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._inductor.fx_passes.bucketing import merge_all_gather_bucket, merge_reduce_scatter_bucket

__all__ = ["FILL", "FILL_AND_PAD", "merge_all_gather_bucket", "merge_reduce_scatter_bucket"]

_BUCKETING: Final[Any] = torch.ops.bucketing

FILL: Final = _BUCKETING._pre_bucket_reduce_scatter.default
"""Operator that fills the buffer of a reduction with gradients of its dtype."""


@torch.library.custom_op("legoai::_pre_bucket_reduce_scatter", mutates_args=())
def _fill_and_pad(gradients: list[torch.Tensor], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """Fill the buffer of a reduction rank by rank with that rank's part of every gradient, with casts and padding.

    Args:
        gradients: of one dtype; if the ranks do not divide the first dimension of one, its last parts are zero-padded.
        ranks: that reduce.
        dtype: of the buffer.
    """
    buffer: torch.Tensor = _buffer(gradients, ranks, dtype)
    torch._chunk_cat(gradients, 0, ranks, out=buffer.view(ranks, -1))
    return buffer


@_fill_and_pad.register_fake
def _buffer(gradients: list[torch.Tensor], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    rows = [-(-gradient.shape[0] // ranks) * ranks for gradient in gradients]
    sizes = [count * gradient.shape[1:].numel() for count, gradient in zip(rows, gradients, strict=True)]
    return gradients[0].new_empty(sum(sizes), dtype=dtype)


_LEGOAI: Final[Any] = torch.ops.legoai

FILL_AND_PAD: Final = _LEGOAI._pre_bucket_reduce_scatter.default
"""Operator that fills it with gradients of another dtype or of other sizes; it also takes the ranks and the dtype."""
