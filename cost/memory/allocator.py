"""CUDA's caching allocator: the memory that it reserves for the storages of a trace.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings: sizes are rounded to 512 bytes;
blocks of at most 1 MiB come from segments of 2 MiB, larger ones below 10 MiB from segments of 20 MiB, and others from
segments of their own, rounded to 2 MiB; the smallest free block of the same stream that fits is taken, and is split if
what remains is of use; neighbours that are free are joined; segments are kept until memory runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

MIB: Final = 2**20
BLOCK: Final = 512
"""Bytes to a multiple of which every block is rounded."""
SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LARGE_FROM: Final = 10 * MIB
LARGE_SEGMENT: Final = 20 * MIB
SEGMENT_STEP: Final = 2 * MIB
_ADDRESS_BITS: Final = 64
_ADDRESS: Final = 2**_ADDRESS_BITS - 1


def round_block(size: int) -> int:
    """Return the bytes of the block that serves a request; 0 for 0.

    >>> round_block(1), round_block(513)
    (512, 1024)
    """
    return -(-size // BLOCK) * BLOCK


def segment_size(block: int) -> int:
    """Return the bytes that are taken from the device when no free block fits.

    >>> [segment_size(n) // MIB for n in (MIB, 2 * MIB, 10 * MIB, 11 * MIB)]
    [2, 20, 10, 12]
    """
    if block <= SMALL:
        return SMALL_SEGMENT
    if block < LARGE_FROM:
        return LARGE_SEGMENT
    return -(-block // SEGMENT_STEP) * SEGMENT_STEP


class OutOfMemoryError(RuntimeError):
    """The device has no memory for a request, even when all cached segments are given back."""


class Block:
    """A piece of a segment, with its neighbours."""

    __slots__ = ("address", "after", "before", "free", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None


class Pool:
    """The free blocks of one stream, small or large, ordered by size and then address.

    Attributes:
        stream: of the blocks.
        keys: of the blocks, ascending: a block's size above the bits of its address.
        blocks: by their addresses.
    """

    __slots__ = ("blocks", "keys", "stream")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Take a block that is free."""
        insort(self.keys, block.size << _ADDRESS_BITS | block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Give a block out."""
        del self.keys[bisect_left(self.keys, block.size << _ADDRESS_BITS | block.address)]
        del self.blocks[block.address]

    def take(self, size: int) -> Block | None:
        """Give out the smallest free block of at least a size; None where none is."""
        keys = self.keys
        place = bisect_left(keys, size << _ADDRESS_BITS)
        return self.blocks.pop(keys.pop(place) & _ADDRESS) if place < len(keys) else None


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        reserved: bytes taken from the device.
        allocated: bytes of the blocks that are in use.
        peak_reserved: the most that `reserved` was.
        peak_allocated: the most that `allocated` was.
        retries: how often cached segments were given back because memory had run out.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        """Make the allocator of a device with `capacity` bytes for segments; None for no limit."""
        self.capacity = capacity
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.used: dict[int, tuple[Block, Pool, bool]] = {}
        self.next_address = 0

    def allocate(self, handle: int, size: int, stream: int) -> None:
        """Serve a request of some bytes on a stream, to be known by a handle.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        assert handle not in self.used
        wanted = -(-size // BLOCK) * BLOCK  # as `round_block`, of which there are hundreds of thousands
        if not wanted:
            return
        small = wanted <= SMALL
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = Pool(stream)
        block = pool.take(wanted) or self.new_segment(wanted)
        rest = block.size - wanted
        if rest >= BLOCK if small else rest > SMALL:
            behind = Block(block.address + wanted, rest)
            behind.before, behind.after = block, block.after
            if block.after is not None:
                block.after.before = behind
            block.after, block.size = behind, wanted
            pool.add(behind)
        block.free = False
        self.used[handle] = block, pool, small
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, handle: int) -> None:
        """Take back what a handle stands for; nothing if it was of no bytes."""
        held = self.used.pop(handle, None)
        if held is None:
            return
        block, pool, _ = held
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            _join(before, block)
            block = before
        if after is not None and after.free:
            pool.remove(after)
            _join(block, after)
        block.free = True
        pool.add(block)

    def reset_peaks(self) -> None:
        """Start new measurements of the peaks."""
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def release_cached(self) -> None:
        """Give back the segments of which nothing is in use, as `torch.cuda.empty_cache` does."""
        for pool in self.pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def new_segment(self, wanted: int) -> Block:
        """Take the segment from the device that serves a block of a size."""
        size = segment_size(wanted)
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.retries += 1
            self.release_cached()
            if self.reserved + size > self.capacity:
                raise OutOfMemoryError(
                    f"{wanted} bytes do not fit: {self.reserved} of {self.capacity} are reserved, and {self.allocated} "
                    "of these are in use"
                )
        block = Block(self.next_address, size)
        self.next_address += size
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block


def _join(first: Block, second: Block) -> None:
    """Let the first of two neighbours take the place of both."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
