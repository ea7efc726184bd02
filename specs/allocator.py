"""Blocks of CUDA's caching allocator."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 512
"""Bytes to a multiple of which every block is rounded: the unit of sizes and addresses in a pool."""


def round_block(size: int) -> int:
    """Return the bytes of the block that serves a request; 0 for 0.

    >>> round_block(1), round_block(513)
    (512, 1024)
    """
    return -(-size // BLOCK) * BLOCK
