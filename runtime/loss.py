"""What does a step minimise?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean loss of logits [batch, sequence, vocabulary] and targets [batch, sequence]."""


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over tokens, in nats.

    Computed in float32, or in float64 where the logits are float64.

    Args:
        logits: [batch, sequence, vocabulary]; a DTensor sharded on the vocabulary inside `loss_parallel()`.
        targets: [batch, sequence], int64.

    Returns:
        A scalar.
    """
    return _summed(logits, targets, reduction="mean")


def chunked_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, pieces: int) -> torch.Tensor:
    """Return what `token_cross_entropy` returns, computed piece by piece of the sequence.

    Each piece is computed again in the backward pass, so that only one piece of the logits exists in float32, in
    forward and in backward.

    Args:
        logits: as of `token_cross_entropy`.
        targets: as of `token_cross_entropy`.
        pieces: into which the sequence is cut; at most its length.

    Returns:
        A scalar.
    """
    parts = zip(logits.tensor_split(pieces, dim=1), targets.tensor_split(pieces, dim=1), strict=True)
    total = sum(
        checkpoint(_summed, part, answers, use_reentrant=False, preserve_rng_state=False) for part, answers in parts
    )
    assert isinstance(total, torch.Tensor), "there is at least one piece"
    return total / targets.numel()


def _summed(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), reduction=reduction)


LOSSES = ("eager", "fused", "chunked")
"""The losses that a program can name."""


def loss_function(name: str, *, pieces: int = 1) -> LossFunction:
    """Return a loss of `LOSSES`: as it is, compiled to one kernel, or in ``pieces`` of the sequence."""
    if name == "fused":
        return torch.compile(token_cross_entropy, fullgraph=True)
    return partial(chunked_cross_entropy, pieces=pieces) if name == "chunked" else token_cross_entropy


def loss_context(*, parallel: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of forward loss and backward: vocabulary-parallel cross entropy, or nothing."""
    return loss_parallel() if parallel else contextlib.nullcontext()


def local_value(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of this rank's samples as a plain, detached scalar."""
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
