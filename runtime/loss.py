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
"""The mean loss of a model's result and targets, such as logits [batch, sequence, vocabulary] and [batch, sequence]."""


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over tokens, or over images, in nats.

    Computed in float32, or in float64 where the logits are float64.

    Args:
        logits: [batch, sequence, vocabulary] or [batch, classes]; a DTensor sharded on the last dim inside
            `loss_parallel()`.
        targets: of the same shape but for the last dim, int64.

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
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def matching_cross_entropy(similarities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return how badly texts and images are matched, in nats: each has to find its own among those of a micro batch.

    The mean of two cross entropies, of a text's image and of an image's text (Radford et al. 2021, figure 3), computed
    in float32, or in float64 where the similarities are.

    Args:
        similarities: [texts, images], times the inverse temperature.
        targets: [texts], int64: each text's image.

    Returns:
        A scalar.
    """
    return (_summed(similarities, targets, "mean") + _summed(similarities.t(), targets.argsort(), "mean")) / 2


LOSSES = ("eager", "fused", "chunked")
"""The losses that a program can name."""


def loss_function(name: str, *, pieces: int = 1, matches: bool = False) -> LossFunction:
    """Return a loss of `LOSSES`: as it is, compiled to one kernel, or in ``pieces`` of the sequence.

    Args:
        name: of the loss.
        pieces: of a `chunked` loss.
        matches: whether the model gives similarities of texts and images, instead of logits.
    """
    if name == "chunked":
        assert not matches, "similarities have no sequence"
        return partial(chunked_cross_entropy, pieces=pieces)
    loss = matching_cross_entropy if matches else token_cross_entropy
    return torch.compile(loss, fullgraph=True) if name == "fused" else loss


def loss_context(*, parallel: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of forward loss and backward: vocabulary-parallel cross entropy, or nothing."""
    return loss_parallel() if parallel else contextlib.nullcontext()


def local_value(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of this rank's samples as a plain, detached scalar."""
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
