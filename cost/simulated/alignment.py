"""Alignment of the rows of a product's matrices in memory.

Tensor cores get their operands by loads of 16 bytes, and by TMA on Hopper, only where every row of a matrix begins at
a multiple of 16 bytes. For others libraries have kernels that load 4 or 2 bytes at a time, at a fraction of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from legoai.cost.kernels.kinds import ALIGNED

_HALF_PRECISION: Final = 2
"""Bytes of the elements of products that are slower: single precision is computed without tensor cores by default."""


def alignments(operands: Iterable[torch.Tensor], result: torch.Tensor) -> dict[str, int]:
    """The bytes to which rows of a product's operands, and of its result, are aligned; empty where to 16 or more."""
    if result.itemsize != _HALF_PRECISION:
        return {}
    found = {"operands_aligned": min(map(_alignment, operands)), "result_aligned": _alignment(result)}
    return {name: size for name, size in found.items() if size < ALIGNED}


def _alignment(matrix: torch.Tensor) -> int:
    strides = [stride for stride, size in zip(matrix.stride(), matrix.shape, strict=True) if size > 1]
    if strides and 1 not in strides:  # torch makes it contiguous for the library
        strides = [matrix.shape[-1]]
    apart = [stride for stride in (*strides, matrix.storage_offset()) if stride > 1]
    return math.gcd(ALIGNED, *(stride * matrix.itemsize for stride in apart))
