"""Micro batches of one optimizer step, on the device of this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from legoai.runtime.data.sequences import MicroBatch
from legoai.runtime.training.state import Training


class Source(Protocol):
    """Micro batches of this rank, in host memory."""

    def next(self) -> MicroBatch:
        """Return this rank's next micro batch."""

    def skip(self, batches: int) -> None:
        """Pass over micro batches without reading them."""


class Batch:
    """One micro batch, or all those of one pass of a pipeline concatenated, on the device of this rank.

    Attributes:
        inputs: of the model's forward; empty on a rank of a pipeline without its first stage.
        targets: of the loss; None on a rank of a pipeline without its last stage.
        is_last: whether it is the last of the step.
    """

    __slots__ = ("_is_last", "_positions", "inputs", "targets")

    def __init__(
        self,
        inputs: tuple[torch.Tensor, ...],
        targets: torch.Tensor | None,
        *,
        positions: torch.Tensor | None,
        is_last: bool,
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self._positions = positions
        self._is_last = is_last

    @property
    def is_last(self) -> bool:
        """Whether it is the last of the step."""
        return self._is_last

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the inputs' tokens in their sequence, under context parallelism: int64 [tokens]."""
        assert self._positions is not None, "the rank reads whole sequences"
        return self._positions.to(self.inputs[0].device)


class Batches:
    """The micro batches of one step of this rank.

    Args:
        training: whose ranks read them.
        source: of whole micro batches, in host memory.

    Attributes:
        seconds: spent on waiting for the source.
        taken: micro batches that were requested.
        step: the current one, counted from 0.
    """

    def __init__(self, training: Training, source: Source) -> None:
        self.training = training
        self.source = source
        self.seconds = 0.0
        self.taken = 0
        self.step = 0

    def take(self, count: int, *, together: int = 1) -> Iterator[Batch]:
        """Yield the next micro batches of this rank.

        Args:
            count: of the step.
            together: micro batches of one pass of a pipeline, which are yielded as one; divides ``count``.
        """
        self.taken += count
        for index in range(count // together):
            inputs, targets = self._next(together)
            yield self._batch(inputs, targets, is_last=index == count // together - 1)

    def _batch(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, *, is_last: bool) -> Batch:
        staged = self.training.staged
        if staged is not None:
            inputs, targets = inputs if staged.holds_first else (), targets if staged.holds_last else None
        return Batch(inputs, targets, positions=self.training.positions, is_last=is_last)

    def _next(self, together: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        asked = time.perf_counter()
        found = self._one() if self.training.staged is None else self._pass(together)
        self.seconds += time.perf_counter() - asked
        return found

    def _one(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Read this rank's samples, and of these its part of the sequence."""
        batch, device, positions = self.source.next(), self.training.device, self.training.positions
        for look in self.training.control.on_samples:
            look(batch)
        inputs, targets = batch.inputs, batch.targets
        if positions is not None:
            inputs, targets = tuple(item[:, positions] for item in inputs), targets[:, positions]
        return tuple(item.to(device, non_blocking=True) for item in inputs), targets.to(device, non_blocking=True)

    def _pass(self, together: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Read the micro batches of one pass; ranks with neither end of the pipeline only count them."""
        staged = self.training.staged
        assert staged is not None
        if not (staged.holds_first or staged.holds_last):
            self.source.skip(together)
            return (), None
        pairs = [self._one() for _ in range(together)]
        return (torch.cat([tokens for (tokens,), _ in pairs]),), torch.cat([targets for _, targets in pairs])
