"""Split of sequences over context-parallel ranks."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from legoai.runtime.attention.blocks import Balance
from legoai.runtime.errors import RunError, RunErrorCode


def local_positions(*, rank: int, size: int, length: int, balance: Balance) -> torch.Tensor:
    """Return the positions in their sequence of the tokens that a rank holds, in ascending order.

    With `none` a rank holds shard `rank` of `size`. With `head_tail` it holds shards `rank` and `2 size - 1 - rank` of
    `2 size`, so that under a causal mask all ranks have the same number of (query, key) pairs.

    Args:
        rank: coordinate of the rank on the axis.
        size: ranks of the axis.
        length: tokens in a sequence.
        balance: assignment of shards to ranks.

    Returns:
        int64 [length / size].

    Raises:
        ValueError: the shards would not have equal sizes.
    """
    pieces = 2 * size if balance == "head_tail" else size
    if length % pieces:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {pieces} equal pieces")
    every = torch.arange(length).view(pieces, -1)
    if balance == "none":
        return every[rank]
    return torch.cat((every[rank], every[pieces - 1 - rank]))


def check_takes_positions(model: nn.Module) -> None:
    """Check that a model accepts the positions of its tokens.

    Raises:
        RunError: its forward has no parameter `positions`.
    """
    if "positions" not in inspect.signature(model.forward).parameters:
        raise RunError(
            RunErrorCode.POSITIONS,
            f"the forward of {type(model).__name__} has no parameter `positions`, and a context-parallel rank holds "
            "tokens from the middle of a sequence",
            help="let forward(self, tokens, positions=None) take the places of its tokens, int64 [tokens]",
        )
