"""Context-parallel attention by heads: each rank attends to whole sequences with a share of the heads.

Before attention every rank exchanges the heads of its own tokens by an all-to-all, and gets its own heads for all
tokens; afterwards the results are exchanged back (Jacobs et al. 2023, "DeepSpeed Ulysses").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.torch_internals.distributed import collectives

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


def attend_by_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: GroupName,
    size: int,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Scaled dot-product attention over the tokens of all ranks, which are sharded in sequence order.

    Args:
        query: [batch, heads, tokens of a rank, head_dim].
        key: [batch, key heads, tokens of a rank, head_dim].
        value: likewise.
        group: of the ranks, by name.
        size: ranks of the group.
        is_causal: whether a token sees only those up to itself.
        scale: of scores; None for that of PyTorch.
        enable_gqa: whether several query heads may share a key head.

    Returns:
        [batch, heads, tokens of a rank, head_dim].

    Raises:
        RunError: the ranks do not divide the heads.
    """
    for heads in (query.shape[1], key.shape[1]):
        if heads % size:
            raise RunError(
                RunErrorCode.ATTENTION,
                f"{size} ranks cannot share {heads} heads of attention",
                help="let keys and values travel, with `rotate = allgather` or `alltoall`",
            )
    q, k, v = (_Exchange.apply(part, group, size, True) for part in (query, key, value))  # type: ignore[no-untyped-call]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    result = _Exchange.apply(mixed, group, size, False)  # type: ignore[no-untyped-call]
    assert isinstance(result, torch.Tensor)
    return result


class _Exchange(torch.autograd.Function):
    """Redistribution from all heads of some tokens to some heads of all tokens, or back; the gradient is inverse."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: GroupName, size: int, to_heads: bool) -> torch.Tensor:
        ctx.ranks, ctx.back = (group, size), _to_tokens if to_heads else _to_heads
        return (_to_heads if to_heads else _to_tokens)(tensor, group, size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grad, *ctx.ranks), None, None, None


def _to_heads(tensor_bhtd: torch.Tensor, group: GroupName, size: int) -> torch.Tensor:
    """From [batch, heads, tokens, dim] to [batch, heads / size, size * tokens, dim]."""
    by_receiver = torch.stack(tensor_bhtd.chunk(size, dim=1))
    return _exchanged(by_receiver, group, size).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_tokens(tensor_bhtd: torch.Tensor, group: GroupName, size: int) -> torch.Tensor:
    """From [batch, heads, tokens, dim] to [batch, size * heads, tokens / size, dim]."""
    by_receiver = torch.stack(tensor_bhtd.chunk(size, dim=2))
    return _exchanged(by_receiver, group, size).movedim(0, 1).flatten(1, 2)


def _exchanged(by_receiver: torch.Tensor, group: GroupName, size: int) -> torch.Tensor:
    """Send each rank its slice of the first dim, and concatenate the received slices in rank order."""
    flat = by_receiver.flatten()
    each = [flat.numel() // size] * size
    got = collectives.all_to_all_single(flat, each, each, group)
    return (got.wait() if isinstance(got, collectives.AsyncCollectiveTensor) else got).view(by_receiver.shape)
