"""CUDA's caching allocator: the memory that it reserves for the storages of a trace.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings. Sizes are rounded to 512 bytes.
Blocks of at most 1 MiB come from segments of 2 MiB, larger ones below 10 MiB from segments of 20 MiB, and others from
segments of their own, rounded to 2 MiB. A request takes the smallest free block of the same stream that fits, which is
split if the remainder is large enough. Adjacent free blocks are merged. Segments are kept until memory runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from legoai.specs.allocator import BLOCK
from legoai.specs.units import MIB

SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LARGE_FROM: Final = 10 * MIB
LARGE_SEGMENT: Final = 20 * MIB
SEGMENT_STEP: Final = 2 * MIB
ADDRESS_BITS: Final = 40
"""Width of the address in a block's number; the size is above it."""
ADDRESS: Final = 2**ADDRESS_BITS - 1
GIVEN_BACK: Final = -1
"""Stands for a size: the storage is freed."""

PoolKey: TypeAlias = tuple[int, bool]
"""Stream, and whether the blocks are small."""


def segment_size(block: int) -> int:
    """Return the bytes that are allocated from the device when no free block fits.

    >>> [segment_size(n) // MIB for n in (MIB, 2 * MIB, 10 * MIB, 11 * MIB)]
    [2, 20, 10, 12]
    """
    if block <= SMALL:
        return SMALL_SEGMENT
    if block < LARGE_FROM:
        return LARGE_SEGMENT
    return -(-block // SEGMENT_STEP) * SEGMENT_STEP


class OutOfMemoryError(RuntimeError):
    """The device has no memory for a request, even after all cached segments were freed."""


class Pool:
    """The blocks of one stream, small or large.

    A block is one integer: its size in the high bits and its address in the low ones, both in units of 512 bytes. So
    the smallest block that fits, and among equal ones that of the lowest address, is found by bisection, and hundreds
    of thousands of requests allocate no objects.

    Attributes:
        free: free blocks, ascending.
        starts: free blocks by address.
        ends: free blocks by end.
        used: blocks in use, by the handles of their storages.
        segments: the end of each segment by its address; two segments are separated by a unit that belongs to neither.
        top: address of the next segment.
        reserved: bytes of the segments.
        grow: called before a segment is allocated from the device, with a function that returns the segment's bytes;
            the function is called again if cached segments were freed first.
        expands: whether a free block may grow, so that the smallest block that fits is not always chosen.
    """

    __slots__ = ("ends", "expands", "free", "grow", "least", "reserved", "segments", "starts", "top", "used")

    def __init__(self, *, small: bool, grow: Callable[[Callable[[], int]], None] | None = None) -> None:
        self.grow = grow
        self.expands = False
        self.free: list[int] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.top = self.reserved = 0
        self.least = 1 if small else SMALL // BLOCK + 1
        """Fewest units of a block's remainder that are split off."""

    def serve(self, handles: Iterable[int], sizes: Iterable[int], used: dict[int, int] | None = None) -> None:
        """Serve requests in order.

        Args:
            handles: of the storages.
            sizes: of the blocks, in units, at least 1; `GIVEN_BACK` for a storage that is freed.
            used: blocks in use, by these handles; by default :attr:`used`.

        Raises:
            OutOfMemoryError: a request does not fit.
        """
        free, starts, ends = self.free, self.starts, self.ends
        least, expands = self.least << ADDRESS_BITS, self.expands
        if used is None:
            used = self.used
        for handle, size in zip(handles, sizes, strict=True):
            if size < 0:
                block = used.pop(handle)
                start = block & ADDRESS
                end = start + (block >> ADDRESS_BITS)
                before = ends.pop(start, None)
                if before is not None:
                    del free[bisect_left(free, before)]
                    block += before - start  # adds its size, and replaces the address
                    start = before & ADDRESS
                after = starts.pop(end, None)
                if after is not None:
                    del free[bisect_left(free, after)]
                    block += after - end
                    end += after >> ADDRESS_BITS
                starts[start] = ends[end] = block
                insort(free, block)
                continue
            wanted = size << ADDRESS_BITS
            place = bisect_left(free, wanted)
            if expands:
                place = self.best(place)
            block = free.pop(place) if place < len(free) else self.segment(size)
            start, left = block & ADDRESS, block - wanted
            del starts[start]
            if left >= least:
                used[handle] = wanted | start
                left += size  # the address of the remainder
                starts[start + size] = ends[start + (block >> ADDRESS_BITS)] = left
                insort(free, left)
            else:
                used[handle] = block
                del ends[start + (block >> ADDRESS_BITS)]

    def put(self, free: Sequence[int]) -> None:
        """Replace the free blocks of the segments.

        Args:
            free: ascending.
        """
        self.free[:] = free
        self.starts = {block & ADDRESS: block for block in free}
        self.ends = {(block & ADDRESS) + (block >> ADDRESS_BITS): block for block in free}

    def best(self, place: int) -> int:
        """Return the index of the free block to use, given the index of the smallest that fits."""
        return place

    def segment(self, size: int) -> int:
        """Allocate from the device the segment for a block of a size."""
        wanted = segment_size(size * BLOCK)
        if self.grow is not None:
            self.grow(lambda: wanted)
        start, units = self.top, wanted // BLOCK
        block = units << ADDRESS_BITS | start
        self.segments[start] = end = start + units
        self.starts[start] = self.ends[end] = block
        self.top = end + 1
        self.reserved += wanted
        return block

    def release(self) -> int:
        """Free the segments without a block in use; return their bytes."""
        before = self.reserved
        for start, end in list(self.segments.items()):
            block = (end - start) << ADDRESS_BITS | start
            if self.starts.get(start) == block:
                del self.segments[start], self.starts[start], self.ends[end], self.free[bisect_left(self.free, block)]
                self.reserved -= (end - start) * BLOCK
        return before - self.reserved


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        capacity: bytes for segments; None for no limit.
        kind: class of its pools.

    Attributes:
        pools: by stream, and whether their blocks are small.
        reserved: bytes taken from the device.
        peak_reserved: the maximum of `reserved`.
        retries: how often cached segments were freed because memory had run out.
    """

    def __init__(self, *, capacity: int | None = None, kind: type[Pool] = Pool) -> None:
        self.capacity = capacity
        self.kind = kind
        self.pools: dict[PoolKey, Pool] = {}
        self.reserved = self.peak_reserved = self.retries = 0

    @property
    def allocated(self) -> int:
        """Bytes of the blocks that are in use."""
        return sum(block >> ADDRESS_BITS for pool in self.pools.values() for block in pool.used.values()) * BLOCK

    def pool(self, key: PoolKey) -> Pool:
        """Return the pool of a key."""
        found = self.pools.get(key)
        if found is None:
            found = self.pools[key] = self.kind(small=key[1], grow=self._grow)
        return found

    def release_cached(self) -> None:
        """Free the segments without a block in use, as `torch.cuda.empty_cache` does."""
        self.reserved -= sum(pool.release() for pool in self.pools.values())

    def _grow(self, wanted: Callable[[], int]) -> None:
        """Make room for a segment, and count it."""
        size = wanted()
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.retries += 1
            self.release_cached()
            size = wanted()
            if self.reserved + size > self.capacity:
                raise OutOfMemoryError(
                    f"a segment of {size} bytes does not fit: {self.reserved} of {self.capacity} are reserved, and "
                    f"{self.allocated} of these are in use"
                )
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
