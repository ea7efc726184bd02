"""Liveness of the operations of a forward: whether its result depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from legoai.specs.models.torch_internals import storage_of


class _Access(NamedTuple):
    """The storages that one operation reads and writes."""

    read: frozenset[int]
    written: frozenset[int]
    is_live: bool


class Liveness:
    """Notes the storages that each operation reads and writes, to tell afterwards which operations are live.

    A view has the storage of its tensor, so that a value that is written by one name is read by another. Where a tensor
    appears that no noted operation made, something is not seen, and all operations count as live.
    Tensors are kept alive until it is deleted, so that storages stay unique: record on the meta device.

    Args:
        model: whose parameters and buffers outlive the forward: what is written to them is live.
        inputs: tensors that the forward is given.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._accesses: list[_Access] = []
        self._kept = [*inputs, *model.parameters(), *model.buffers()]
        self._known = _storages(self._kept)
        self._misses = False

    def note(self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], *, is_live: bool) -> int:
        """Note an operation and return its number.

        Args:
            given: the tensors that it takes.
            results: those that it returns or changes.
            is_live: whether it may have done more than that.
        """
        self._kept += results
        read, written = _storages(given), _storages(results)
        self._misses |= not read <= self._known
        self._known |= written
        self._accesses.append(_Access(read, written, is_live))
        return len(self._accesses) - 1

    def live(self, result: Any) -> set[int]:
        """Return the numbers of the operations that the result of the forward depends on; of all where it is unsure."""
        reached = _storages([result]) if isinstance(result, torch.Tensor) else frozenset()
        if self._misses or not reached or not reached <= self._known:
            return set(range(len(self._accesses)))
        reached |= _storages([*self._model.parameters(), *self._model.buffers()])
        found = set()
        for number in reversed(range(len(self._accesses))):
            access = self._accesses[number]
            if access.is_live or not reached.isdisjoint(access.written):
                reached |= access.read
                found.add(number)
        return found


def _storages(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    return frozenset(map(storage_of, tensors))
