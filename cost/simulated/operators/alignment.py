"""Alignment of the rows of a product's matrices in memory.

Tensor cores get their operands by loads of 16 bytes, and by TMA on Hopper, only where every row of a matrix begins at
a multiple of 16 bytes. For others libraries have kernels that load 4 or 2 bytes at a time, at a fraction of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch

from legoai.cost.kernels.kinds import ALIGNED

_HALF_PRECISION: Final = 2
"""Bytes of the elements of products that are slower: single precision is computed without tensor cores by default."""


class Matrix(NamedTuple):
    """A matrix in memory, or a batch of them.

    Attributes:
        shape: rows and columns last.
        strides: elements between neighbours, for each dim.
        offset: elements of its memory before the first.
        item: bytes of an element.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    item: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Matrix:
        """Return the matrix that a tensor is."""
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.itemsize)

    @property
    def aligned(self) -> int:
        """Bytes, at most 16, at multiples of which all rows begin, or all columns where these are contiguous."""
        dims = [(size, stride) for size, stride in zip(self.shape, self.strides, strict=True) if size > 1]
        inside = [stride for size, stride in zip(self.shape[-2:], self.strides[-2:], strict=True) if size > 1]
        if inside and 1 not in inside:  # torch makes it contiguous for the library
            return math.gcd(ALIGNED, self.shape[-1] * self.item)
        apart = [stride for _, stride in dims]
        if inside:
            apart.remove(1)
        return math.gcd(ALIGNED, self.offset * self.item, *(stride * self.item for stride in apart))


def alignments(operands: Iterable[Matrix], result: Matrix) -> dict[str, int]:
    """The bytes to which rows of a product's operands, and of its result, are aligned; empty where to 16 or more."""
    if result.item != _HALF_PRECISION:
        return {}
    found = {"operands_aligned": min(one.aligned for one in operands), "result_aligned": result.aligned}
    return {name: size for name, size in found.items() if size < ALIGNED}
