"""Expandable segments, against a block-by-block model of CUDA's allocator."""

from __future__ import annotations

import random

import pytest

from legoai.cost.memory.allocator import GIVEN_BACK, CachingAllocator, OutOfMemoryError
from legoai.cost.memory.expandable import ExpandablePool
from legoai.cost.memory.reserving import reserve
from legoai.cost.trace.records import Allocate, Free
from legoai.cost.trace.trace import Trace
from legoai.specs.allocator import BLOCK
from legoai.specs.units import MIB
from support.simulation.allocator import pool_key
from support.simulation.expandable_segments import FullError, Reference

SIZES = (512, 4096, MIB // 3, MIB, MIB + 512, 3 * MIB, 9 * MIB, 10 * MIB + 512, 20 * MIB, 33 * MIB, 50 * MIB)


class Allocator(CachingAllocator):
    """The allocator, asked for bytes on a stream, known by a handle."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity=capacity, kind=ExpandablePool)
        self.homes: dict[int, ExpandablePool] = {}

    def allocate(self, handle: int, size: int, stream: int = 0) -> None:
        self.homes[handle] = pool = self.pool(pool_key(stream, size))
        pool.serve([handle], [-(-size // BLOCK)])

    def free(self, handle: int) -> None:
        self.homes.pop(handle).serve([handle], [GIVEN_BACK])


def test_expandable_segment_grows_by_whole_pages():
    allocator = Allocator()
    allocator.allocate(0, 512)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1, 12 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(2, 12 * MIB)  # 8 MiB are free, and the next page is put behind them
    assert allocator.reserved == 42 * MIB


def test_freed_block_is_extended_for_a_larger_request():
    allocator = Allocator()
    allocator.allocate(0, 30 * MIB)
    allocator.free(0)
    allocator.allocate(1, 50 * MIB)
    assert allocator.reserved == 60 * MIB  # segments of their own would take 80 MiB


def test_last_free_block_is_reserved_for_larger_requests():
    allocator = Allocator()
    for handle in range(3):
        allocator.allocate(handle, 20 * MIB)
    allocator.free(0)
    allocator.free(2)  # both are 20 MiB, and the last one can grow
    allocator.allocate(3, 20 * MIB)
    allocator.allocate(4, 30 * MIB)
    assert allocator.reserved == 80 * MIB


def test_unused_pages_are_released_before_out_of_memory():
    allocator = Allocator(capacity=100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.allocate(1, 10 * MIB)
    allocator.free(0)
    allocator.allocate(2, 70 * MIB)  # 60 MiB lie in front of what is in use, and are unmapped
    assert (allocator.reserved, allocator.retries) == (80 * MIB, 1)
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        allocator.allocate(3, 40 * MIB)


@pytest.mark.parametrize("capacity", [None, 400 * MIB, 200 * MIB, 120 * MIB])
@pytest.mark.parametrize("seed", range(60))
def test_random_requests_equal_a_reference_allocator(seed: int, capacity: int | None):
    draw = random.Random(f"{seed} {capacity}")
    mine, theirs = Allocator(capacity), Reference(capacity)
    held: list[int] = []
    for handle in range(300):
        if held and draw.random() < 0.48:
            gone = held.pop(draw.randrange(len(held)))
            mine.free(gone)
            theirs.free(gone)
        size, stream = draw.choice(SIZES), int(draw.random() < 0.2)
        try:
            theirs.allocate(handle, size, stream)
        except FullError:
            with pytest.raises(OutOfMemoryError):
                mine.allocate(handle, size, stream)
            return
        mine.allocate(handle, size, stream)
        held.append(handle)
        assert (mine.reserved, mine.peak_reserved, mine.retries) == (theirs.reserved, theirs.peak, theirs.retries)


def test_expandable_segments_reserve_less_for_growing_requests():
    def made(storage: int, size: int) -> Allocate:
        return Allocate(storage=storage, bytes=size, stream=0, category="other", module="", phase="forward")

    sizes = [30 * MIB + 2 * MIB * place for place in range(8)]
    items = tuple(item for storage, size in enumerate(sizes) for item in (made(storage, size), Free(storage)))
    trace = Trace(rank=0, world=1, stage=0, items=items)
    assert reserve(trace).peak_reserved == sum(sizes)
    assert reserve(trace, expandable=True).peak_reserved == 60 * MIB
    assert reserve(trace, capacity=60 * MIB, expandable=True).fits
    assert not reserve(trace, capacity=40 * MIB, expandable=True).fits
