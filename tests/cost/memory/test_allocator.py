"""The caching allocator: sizes, splits and joins as CUDA's has them, and invariants under random requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legoai.cost.memory.allocator import (
    GIVEN_BACK,
    CachingAllocator,
    OutOfMemoryError,
    segment_size,
)
from legoai.cost.memory.reserving import reserve
from legoai.cost.trace.records import Allocate, Free, Resize
from legoai.cost.trace.trace import Trace
from legoai.specs.allocator import BLOCK, round_block
from legoai.specs.units import MIB
from support.simulation.allocator import pool_key


class Allocator(CachingAllocator):
    """The allocator, asked as torch's is: for bytes on a stream, known by a handle."""

    def allocate(self, handle: int, size: int, stream: int) -> None:
        if size:
            self.pool(pool_key(stream, size)).serve([handle], [-(-size // BLOCK)])

    def free(self, handle: int) -> None:
        for pool in self.pools.values():
            if handle in pool.used:
                pool.serve([handle], [GIVEN_BACK])


def allocator_after(*sizes: int) -> Allocator:
    allocator = Allocator()
    for handle, size in enumerate(sizes):
        allocator.allocate(handle, size, 0)
    return allocator


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 1, 10 * MIB), (9 * MIB, 20 * MIB),
     (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB)],
)  # fmt: skip
def test_first_request_reserves_a_segment_of_its_size_class(size, reserved):
    assert allocator_after(size).reserved == reserved == segment_size(round_block(size))


def test_small_requests_share_a_segment_and_large_ones_another():
    assert allocator_after(512, 512, MIB).reserved == 2 * MIB
    assert allocator_after(2 * MIB, 9 * MIB, 9 * MIB).reserved == 20 * MIB
    assert allocator_after(512, 2 * MIB).reserved == 22 * MIB


def test_large_block_is_split_only_if_over_one_mib_remains():
    assert allocator_after(11 * MIB).allocated == 12 * MIB  # the rest of 1 MiB stays with the block
    assert allocator_after(13 * MIB - 512).allocated == 13 * MIB - 512


def test_freed_blocks_are_reused_and_merged():
    allocator = allocator_after(4 * MIB, 4 * MIB, 4 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(3, 8 * MIB, 0)
    assert allocator.reserved == 20 * MIB


def test_best_fit_block_is_used():
    allocator = allocator_after(30 * MIB, 12 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB, 0)
    allocator.allocate(3, 30 * MIB, 0)
    assert allocator.reserved == 42 * MIB


def test_streams_have_separate_pools():
    allocator = Allocator()
    allocator.allocate(0, 12 * MIB, 0)
    allocator.free(0)
    allocator.allocate(1, 12 * MIB, 1)
    assert allocator.reserved == 24 * MIB and allocator.allocated == 12 * MIB


def test_cached_segments_are_released_before_out_of_memory():
    allocator = Allocator(capacity=40 * MIB)
    allocator.allocate(0, 30 * MIB, 0)
    allocator.free(0)
    allocator.allocate(1, 34 * MIB, 0)
    assert (allocator.reserved, allocator.retries) == (34 * MIB, 1)
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        allocator.allocate(2, 8 * MIB, 0)


@given(st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 1), st.booleans()), max_size=60))
def test_random_requests_lose_no_blocks(requests):
    allocator = Allocator()
    held = []
    for handle, (size, stream, drop) in enumerate(requests):
        allocator.allocate(handle, size, stream)
        held.append(handle)
        if drop:
            allocator.free(held.pop(len(held) // 2))
        assert allocator.allocated <= allocator.reserved
    for handle in held:
        allocator.free(handle)
    assert allocator.allocated == 0
    allocator.release_cached()
    assert allocator.reserved == 0


def test_resize_is_a_free_and_a_request():
    def made(storage: int, size: int) -> Allocate:
        return Allocate(storage=storage, bytes=size, stream=0, category="other", module="", phase="forward")

    records = (made(0, 30 * MIB), Resize(0, 0), made(1, 30 * MIB), Free(1), Resize(0, 30 * MIB))
    found = reserve(Trace(rank=0, world=1, stage=0, items=records))
    assert (found.peak_reserved, found.fits) == (30 * MIB, True)
    assert not reserve(Trace(rank=0, world=1, stage=0, items=records), capacity=20 * MIB).fits
