"""Expandable segments of CUDA's caching allocator: one segment for each pool, which grows page by page.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with `expandable_segments:True`. Each stream has one address
range for small and one for large blocks, into which memory is mapped in pages of 2 MiB or 20 MiB. A request takes the
smallest free block that fits; a block that can grow counts with the size that it can grow to. Otherwise it takes the
lowest address at which free and unmapped memory together suffice, and the missing pages are mapped. Any remainder of a
block is split off. When memory runs out, all pages without a block in use are unmapped, wherever they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from legoai.cost.memory.allocator import ADDRESS, ADDRESS_BITS, LARGE_SEGMENT, SMALL_SEGMENT, Pool
from legoai.specs.allocator import BLOCK

_ENDLESS = 2**ADDRESS_BITS
"""End of all addresses, in units: the range is larger than the device's memory."""


class ExpandablePool(Pool):
    """The blocks of one stream, small or large, in one segment that grows.

    Attributes:
        page: units that are mapped together.
        holes: unmapped ranges between two mapped pages: the end of each by its start, ascending.
    """

    __slots__ = ("holes", "page")

    def __init__(self, *, small: bool, grow: Callable[[Callable[[], int]], None] | None = None) -> None:
        super().__init__(small=small, grow=grow)
        self.page = (SMALL_SEGMENT if small else LARGE_SEGMENT) // BLOCK
        self.holes: dict[int, int] = {}
        self.least, self.expands = 1, True

    def best(self, place: int) -> int:
        """Return the index of the free block to use, given the index of the smallest that fits."""
        free = self.free
        while place + 1 < len(free) and self._reach(free[place + 1]) < self._reach(free[place]):
            place += 1
        return place

    def _reach(self, block: int) -> int:
        """Return the units of a free block together with the unmapped memory after it."""
        end = (block & ADDRESS) + (block >> ADDRESS_BITS)
        return (block >> ADDRESS_BITS) + self._unmapped(end)

    def _unmapped(self, start: int) -> int:
        """Return the units of unmapped memory that starts at an address."""
        return _ENDLESS if start == self.top else self.holes.get(start, start) - start

    def segment(self, size: int) -> int:
        """Map the pages that a block of a size needs at its address."""
        if self.grow is not None:
            self.grow(lambda: sum(stop - start for start, stop in self._missing(size)) * BLOCK)
        pages = list(self._missing(size))
        for start, stop in pages:
            self._map(start, stop)
        return self._join(pages[-1][1])

    def _missing(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the pages to map for a block of a size, in order."""
        start = self._place(size)
        end, at = start + size, start
        while at < end:
            block = self.starts.get(at)
            if block is not None:
                at += block >> ADDRESS_BITS
            else:
                pages = -(-min(end - at, self._unmapped(at)) // self.page) * self.page
                yield at, at + pages
                at += pages

    def _place(self, size: int) -> int:
        """Return the lowest address at which free memory, with some unmapped memory, suffices."""
        for hole in (*self.holes, self.top):
            before = self.ends.get(hole)
            start = at = hole if before is None else before & ADDRESS
            while at - start < size:
                block = self.starts.get(at)
                more = self._unmapped(at) if block is None else block >> ADDRESS_BITS
                if not more:
                    break
                at += more
            else:
                return start
        raise AssertionError("the segment has no end")

    def _map(self, start: int, stop: int) -> None:
        """Map pages, as one free block."""
        if start == self.top:
            self.top = stop
        else:
            end = self.holes.pop(start)
            if stop < end:
                self.holes = dict(sorted({**self.holes, stop: end}.items()))
        block = (stop - start) << ADDRESS_BITS | start
        self.starts[start] = self.ends[stop] = block
        insort(self.free, block)
        self.reserved += (stop - start) * BLOCK

    def _join(self, end: int) -> int:
        """Merge the free blocks around the end of newly mapped pages, and remove the result from the free blocks."""
        start = end
        while (before := self.ends.pop(start, None)) is not None:
            start = before & ADDRESS
            self._take(before)
        while (after := self.starts.get(end)) is not None:
            del self.ends[end + (after >> ADDRESS_BITS)]
            self._take(after)
            end += after >> ADDRESS_BITS
        block = (end - start) << ADDRESS_BITS | start
        self.starts[start] = self.ends[end] = block
        return block

    def _take(self, block: int) -> None:
        """Remove a block from the free ones."""
        del self.starts[block & ADDRESS]
        del self.free[bisect_left(self.free, block)]

    def release(self) -> int:
        """Unmap the pages without a block in use; return their bytes."""
        before, page = self.reserved, self.page
        for block in list(self.free):
            begin, size = block & ADDRESS, block >> ADDRESS_BITS
            start, stop = -(-begin // page) * page, (begin + size) // page * page
            if start >= stop:
                continue
            del self.ends[begin + size]
            self._take(block)
            for first, last in ((begin, start), (stop, begin + size)):
                if first < last:
                    rest = (last - first) << ADDRESS_BITS | first
                    self.starts[first] = self.ends[last] = rest
                    insort(self.free, rest)
            self._unmap(start, stop)
        return before - self.reserved

    def _unmap(self, start: int, stop: int) -> None:
        """Turn pages into a hole, merged with adjacent holes."""
        self.reserved -= (stop - start) * BLOCK
        joined: dict[int, int] = {}
        last = -1
        for first, end in sorted({**self.holes, start: stop}.items()):
            if joined and joined[last] == first:
                joined[last] = end
            else:
                joined[first], last = end, first
        if joined[last] == self.top:
            self.top = last
            del joined[last]
        self.holes = joined
