"""Expandable segments of CUDA's caching allocator, block by block as `c10/cuda/CUDACachingAllocator.cpp` keeps them.

Slow, and without anything in common with :mod:`legoai.cost.memory.expandable`, which is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
LEAST = 512
ENDLESS = 2**50


class FullError(RuntimeError):
    """A request does not fit."""


@dataclass(eq=False)
class Block:
    """A piece of the range of addresses: in use, free, or without memory."""

    start: int
    size: int
    mapped: bool = False
    used: bool = False
    before: Block | None = None
    behind: Block | None = None


class Segment:
    """The range of addresses of one stream, for small blocks or for large ones."""

    def __init__(self, *, small: bool) -> None:
        self.page = 2 * MIB if small else 20 * MIB
        self.first = Block(0, ENDLESS)

    def blocks(self) -> list[Block]:
        found, block = [], self.first
        while block is not None:
            found.append(block)
            block = block.behind
        return found

    @property
    def mapped(self) -> int:
        return sum(block.size for block in self.blocks() if block.mapped)

    def allocate(self, size: int, room: int | None) -> Block:
        block = self.smallest(size) or self.grown(size, room)
        block.used = True
        if block.size - size >= LEAST:
            self.cut(block, size).mapped = True
        return block

    def smallest(self, size: int) -> Block | None:
        fitting = sorted(
            (one for one in self.blocks() if one.mapped and not one.used and one.size >= size),
            key=lambda one: (one.size, one.start),
        )
        if not fitting:
            return None
        place = 0
        while place + 1 < len(fitting) and self.reach(fitting[place + 1]) < self.reach(fitting[place]):
            place += 1
        return fitting[place]

    def reach(self, block: Block) -> int:
        behind = block.behind
        return block.size + (behind.size if behind is not None and not behind.mapped else 0)

    def grown(self, size: int, room: int | None) -> Block:
        block = self.place(size)
        if not block.mapped:
            room = self.map(block, min(block.size, size), room)
        while block.size < size:
            behind = block.behind
            assert behind is not None and not behind.mapped
            block, room = behind, self.map(behind, min(size - block.size, behind.size), room)
        return block

    def place(self, size: int) -> Block:
        for block in self.blocks():
            if block.mapped:
                continue
            first = block.before if block.before is not None and not block.before.used else block
            total, one = 0, first
            while total < size and one is not None and not one.used:
                total, one = total + one.size, one.behind
            if total >= size:
                return first
        raise AssertionError

    def map(self, block: Block, size: int, room: int | None) -> int | None:
        pages = -(-size // self.page) * self.page
        if room is not None and pages > room:
            raise FullError
        if pages < block.size:
            self.cut(block, pages)
        block.mapped = True
        self.join(block)
        return None if room is None else room - pages

    def free(self, block: Block) -> None:
        block.used = False
        self.join(block)

    def unmap(self) -> None:
        for block in [one for one in self.blocks() if one.mapped and not one.used]:
            start = -(-block.start // self.page) * self.page
            stop = (block.start + block.size) // self.page * self.page
            if start >= stop:
                continue
            one = block
            if start > block.start:
                one = self.cut(block, start - block.start)
                one.mapped = True
            if stop < one.start + one.size:
                self.cut(one, stop - one.start).mapped = True
            one.mapped = False
            self.join(one)

    def cut(self, block: Block, size: int) -> Block:
        rest = Block(block.start + size, block.size - size, before=block, behind=block.behind)
        if rest.behind is not None:
            rest.behind.before = rest
        block.behind, block.size = rest, size
        return rest

    def join(self, block: Block) -> None:
        before, behind = block.before, block.behind
        if before is not None and not before.used and before.mapped == block.mapped:
            block.start, block.size, block.before = before.start, block.size + before.size, before.before
            if block.before is None:
                self.first = block
            else:
                block.before.behind = block
        if behind is not None and not behind.used and behind.mapped == block.mapped:
            block.size, block.behind = block.size + behind.size, behind.behind
            if block.behind is not None:
                block.behind.before = block


class Reference:
    """The allocator of a device with expandable segments."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.segments: dict[tuple[int, bool], Segment] = {}
        self.held: dict[int, tuple[Segment, Block]] = {}
        self.retries = self.peak = 0

    @property
    def reserved(self) -> int:
        return sum(segment.mapped for segment in self.segments.values())

    def allocate(self, handle: int, size: int, stream: int) -> None:
        size = -(-size // LEAST) * LEAST
        key = stream, size <= MIB
        segment = self.segments.setdefault(key, Segment(small=key[1]))
        try:
            block = segment.allocate(size, self.room())
        except FullError:
            self.retries += 1
            for one in self.segments.values():
                one.unmap()
            block = segment.allocate(size, self.room())
        self.held[handle] = segment, block
        self.peak = max(self.peak, self.reserved)

    def room(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.reserved

    def free(self, handle: int) -> None:
        segment, block = self.held.pop(handle)
        segment.free(block)
