"""Losses of a micro batch, and their sums."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from legoai.runtime.errors import RunError, RunErrorCode

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
    return summed_cross_entropy(logits, targets, reduction="mean")


def chunked_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, pieces: int) -> torch.Tensor:
    """Return the result of `token_cross_entropy`, computed chunk by chunk of the sequence.

    Each chunk is recomputed in the backward pass, so that only one chunk of the logits exists in float32, in forward
    and in backward.

    Args:
        logits: as of `token_cross_entropy`.
        targets: as of `token_cross_entropy`.
        pieces: number of chunks; at most the length of the sequence.

    Returns:
        A scalar.

    Raises:
        ValueError: the logits are sharded on the sequence, of which a chunk would be a copy.
    """
    check_whole_sequences(logits)
    gradient = _Gradient(logits.detach(), pieces)
    parts = (
        (_Chunk.apply(logits, start, size, gradient), targets.narrow(1, start, size))  # type: ignore[no-untyped-call]
        for start, size in chunks_of(targets, pieces)
    )
    total = sum(
        checkpoint(summed_cross_entropy, part, answers, use_reentrant=False, preserve_rng_state=False)
        for part, answers in parts
    )
    assert isinstance(total, torch.Tensor), "there is at least one piece"
    return total / targets.numel()


def check_whole_sequences(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is sharded on its dim 1, the sequence, of which a chunk would be a copy."""
    if isinstance(tensor, DTensor) and any(getattr(item, "dim", None) == 1 for item in tensor.placements):
        raise ValueError("a chunked loss takes whole sequences, and these logits are sharded on the sequence")


def chunks_of(targets: torch.Tensor, pieces: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each chunk of a sequence, in order; lengths differ by one at most.

    Args:
        targets: [batch, sequence].
        pieces: number of chunks.
    """
    least, over = divmod(targets.shape[1], pieces)
    sizes = [least + (place < over) for place in range(pieces)]
    return zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)


@dataclass(slots=True)
class _Gradient:
    """The gradient of logits, of which each chunk writes its part.

    Attributes:
        like: the logits, up to the first chunk's backward.
        left: chunks without a gradient.
        whole: the gradient, from the first chunk's backward to the last one's.
    """

    like: torch.Tensor | None
    left: int
    whole: torch.Tensor | None = None

    def put(self, part: torch.Tensor, start: int) -> torch.Tensor | None:
        """Write a chunk's gradient; return that of all, once it is complete.

        Raises:
            RuntimeError: there was a backward pass before.
        """
        if self.like is not None:
            # The loss outlives its backward pass, and must not keep the logits.
            self.whole, self.like = torch.empty_like(self.like), None
        if self.whole is None:
            raise RuntimeError("a chunked loss has one backward pass")
        self.whole.narrow(1, start, part.shape[1]).copy_(part)
        self.left -= 1
        if self.left:
            return None
        whole, self.whole = self.whole, None
        return whole


class _Chunk(torch.autograd.Function):
    """A chunk of the sequence.

    Backward of a slice makes a gradient as large as the logits, for each chunk, and adds them all; this one makes one.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, start: int, size: int, gradient: _Gradient) -> torch.Tensor:
        ctx.start, ctx.gradient = start, gradient
        return logits.narrow(1, start, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, part: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        return ctx.gradient.put(part, ctx.start), None, None, None


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    """Return the sum, or mean, that `token_cross_entropy` computes, as a scalar."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def matching_cross_entropy(similarities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of texts and images in nats: each is classified among those of its micro batch.

    The mean of two cross entropies, over a text's images and over an image's texts (Radford et al. 2021, figure 3),
    computed in float32, or in float64 where the similarities are.

    Args:
        similarities: [texts, images], times the inverse temperature.
        targets: [texts], int64: each text's image.

    Returns:
        A scalar.

    Raises:
        ValueError: the similarities are of other texts and images too, such as those of all ranks.
    """
    if similarities.shape != (len(targets), len(targets)):
        raise ValueError(
            f"a micro batch of {len(targets)} texts and as many images is compared, and the model returns similarities "
            f"{list(similarities.shape)}: negatives are those of the micro batch alone"
        )
    return (
        summed_cross_entropy(similarities, targets, "mean")
        + summed_cross_entropy(similarities.t(), targets.argsort(), "mean")
    ) / 2


def loss_context(*, parallel: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of forward loss and backward: vocabulary-parallel cross entropy, or nothing."""
    return loss_parallel() if parallel else contextlib.nullcontext()


def local_value(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of this rank's samples as a plain, detached scalar."""
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def of_one_tensor(loss: LossFunction) -> LossFunction:
    """Return a loss that says what is wrong where a model returns more than logits, or something else.

    Lint follows most models' forward and says so before a run; not of those that decide by values.
    """

    def checked(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise RunError(
                RunErrorCode.UNFIT_RESULT,
                f"the model's forward returns a {type(output).__name__}, and the loss takes one tensor",
                help="return the logits alone; docs/factories.md says how a model adds a loss of its own",
            )
        return loss(output, targets)

    return checked


def divided(loss: LossFunction, *, by: float) -> LossFunction:
    """Return the loss of one micro batch as its share of the mean over several."""

    def share(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(output, targets) / by

    return share


def add_losses(total: torch.Tensor, losses: Sequence[torch.Tensor], *, scale: float) -> None:
    """Add to a total, in place, the losses of the micro batches of a pipeline's pass.

    Args:
        total: a scalar.
        losses: from the schedule; empty on a rank without the last stage.
        scale: factor by which the schedule's loss function divides the loss of a micro batch.
    """
    for loss in [loss.detach() * scale for loss in losses]:
        total += local_value(loss)
