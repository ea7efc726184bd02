"""Micro batches of a capture: few of a step, without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from legoai.runtime import Trainer
from legoai.runtime.data.sequences import SampleBatch
from legoai.runtime.training.batches import Batch, Batches, Source
from legoai.runtime.training.state import Training
from legoai.specs.models.reads import InputShape

DISTINCT: Final = 3
"""Micro batches of a step that are captured: the first, the last, and between them one that equals the last."""
_DISTINCT_LAST: Final = 5
"""The same for a step whose last micro batch differs: two of the three between the ends are compared."""


class FewBatches(Batches):
    """The first micro batches of a step; the last one yielded reports being the step's last.

    Args:
        training: of the rank that reads them.
        source: of micro batches.
        most: how many are yielded; None for all. Two more are yielded where the program asks which is the last.
    """

    def __init__(self, training: Training, source: Source, *, most: int | None) -> None:
        super().__init__(training, source)
        self.most = most

    def take(self, count: int, *, together: int = 1) -> Iterator[Batch]:
        """Yield few of the next micro batches."""
        self.taken += count
        index = 0
        while index < self.few:
            inputs, targets = self._next(together)
            yield _Asked(inputs, targets, self, index)
            index += 1

    @property
    def few(self) -> int:
        """Number of micro batches that are yielded."""
        return self.taken if self.most is None else min(self.most, self.taken)


class _Asked(Batch):
    """A micro batch that notes whether the program asks if it is the last."""

    __slots__ = ("_batches", "_index")

    def __init__(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, batches: FewBatches, index: int
    ) -> None:
        super().__init__(inputs, targets, positions=batches.training.positions, is_last=False)
        self._batches, self._index = batches, index

    @property
    def is_last(self) -> bool:
        """Whether it is the last of those that are yielded."""
        if self._batches.most == DISTINCT:
            self._batches.most = _DISTINCT_LAST
        return self._index == self._batches.few - 1


class ValuelessSource:
    """Micro batches without values."""

    def __init__(self, trainer: Trainer, on_next: Callable[[], None]) -> None:
        self.trainer = trainer
        self.on_next = on_next

    def next(self) -> SampleBatch:
        """Return the inputs and targets of the model, on the host."""
        self.on_next()
        reads, sizes = self.trainer.reads, (self.trainer.micro_batch, self.trainer.seq_len)
        return SampleBatch(
            inputs=tuple(map(self._empty, reads.inputs(*sizes))), targets=self._empty(reads.targets(*sizes))
        )

    def _empty(self, item: InputShape) -> torch.Tensor:
        return torch.empty(item.shape, dtype=self.trainer.master_dtype if item.floating else torch.int64)

    def skip(self, batches: int) -> None:
        """Read nothing."""
