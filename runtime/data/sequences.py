"""Sequences of tokens for each data-parallel rank and step, resumable at any step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from legoai.runtime.errors import RunError, RunErrorCode


class Shuffle:
    """A seeded permutation of range(size) that costs O(1) memory and O(1) time per item.

    A Feistel network over the smallest even number of bits that holds `size`, walked along its cycle until
    it falls into the range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); at most 4
    walks on average.
    """

    ROUNDS = 6

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        self.size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        key = hashlib.sha256(f"shuffle:{seed}:{epoch}".encode()).digest()
        self._keys = np.frombuffer(key, dtype="<u4").astype(np.uint64)[: self.ROUNDS]

    def __call__(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each of the items, all in range(size), goes: [n] to [n]."""
        values = self._encrypt(items.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << bits) | right


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """One micro batch of one rank.

    Attributes:
        tokens: [micro batch, sequence], int64.
        targets: [micro batch, sequence], int64; the token after each.
    """

    tokens: torch.Tensor
    targets: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The inputs of the model's forward."""
        return (self.tokens,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """One micro batch of one rank, for a model whose input is not one sequence.

    Attributes:
        inputs: of the model's forward, in the order of `legoai.specs.models.reads`.
        targets: of the loss.
    """

    inputs: tuple[torch.Tensor, ...]
    targets: torch.Tensor


MicroBatch = SequenceBatch | SampleBatch


class TokenStream:
    """A stateful stream of shuffled windows over a corpus.

    Sample k of the global order is the same for every data-parallel degree and every rank: epoch
    `k // windows`, window `shuffle(epoch)(k % windows)`. The whole state is the number of samples that all ranks
    together have consumed, so a run resumes in the middle of an epoch, and with another degree.

    Args:
        tokens: [corpus], unsigned.
        seq_len: tokens in a sequence.
        micro_batch: sequences in the micro batch of one rank.
        rank: index of this rank among those that read different samples.
        degree: their number.
        seed: of the order; None keeps the corpus' own order, as for validation.
        consumed: samples to start after.
        name: of the corpus, for errors.

    Raises:
        RunError: the corpus has no whole window.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        *,
        seq_len: int,
        micro_batch: int,
        rank: int = 0,
        degree: int = 1,
        seed: int | None,
        consumed: int = 0,
        name: str = "corpus",
    ) -> None:
        assert 0 <= rank < degree
        self.windows = (len(tokens) - 1) // seq_len
        if self.windows < 1:
            raise RunError(
                RunErrorCode.DATA_TOO_SHORT,
                f"{name} has {len(tokens)} tokens, and one sequence of {seq_len} needs {seq_len + 1}",
                help="give more text, or a shorter seq_len in the plan",
            )
        self._tokens = tokens
        self._seq_len = seq_len
        self._micro_batch = micro_batch
        self._rank = rank
        self._degree = degree
        self._seed = seed
        self._shuffles: dict[int, Shuffle] = {}
        self.consumed = consumed

    @property
    def epoch(self) -> float:
        """Passes over the corpus so far."""
        return self.consumed / self.windows

    def samples(self) -> NDArray[np.int64]:
        """Return the indices in the global order of this rank's next micro batch: [micro batch]."""
        start = self.consumed + self._rank * self._micro_batch
        return np.arange(start, start + self._micro_batch, dtype=np.int64)

    def next(self) -> SequenceBatch:
        """Return this rank's next micro batch, and count those of all ranks as consumed."""
        starts = self._windows_of(self.samples()) * self._seq_len
        rows = self._tokens[starts[:, None] + np.arange(self._seq_len + 1)]
        self.consumed += self._degree * self._micro_batch
        whole = torch.from_numpy(rows.astype(np.int64))
        return SequenceBatch(tokens=whole[:, :-1].contiguous(), targets=whole[:, 1:].contiguous())

    def skip(self, batches: int) -> None:
        """Count micro batches of all ranks as consumed without reading them."""
        self.consumed += batches * self._degree * self._micro_batch

    def _windows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(samples, self.windows)
        if self._seed is None:
            return places
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            places[inside] = self._shuffle(int(epoch))(places[inside])
        return places

    def _shuffle(self, epoch: int) -> Shuffle:
        if epoch not in self._shuffles:
            assert self._seed is not None
            self._shuffles = {epoch: Shuffle(self.windows, seed=self._seed, epoch=epoch)}
        return self._shuffles[epoch]
