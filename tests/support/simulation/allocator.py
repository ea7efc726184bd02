"""Pools of the caching allocator that serve a test's requests."""

from __future__ import annotations

from legoai.cost.memory.allocator import SMALL, PoolKey
from legoai.specs.allocator import round_block


def pool_key(stream: int, size: int) -> PoolKey:
    """Return the pool that serves a request of some bytes."""
    return stream, round_block(size) <= SMALL
