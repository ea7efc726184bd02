"""Reserved memory of a trace: its storages in the caching allocator, repeated segments served at once.

What the requests of a segment come to depends on the free blocks of the pools that they are served from: on their
sizes, on which of two equal ones has the lower address, and on what lies beside the blocks that the segment gives back.
Where an instance finds these as an earlier one found them, the same happens, at other addresses, and is done at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from legoai.cost.memory.allocator import SMALL, Block, CachingAllocator, OutOfMemoryError, Pool, round_block
from legoai.cost.memory.effects import MemoryEffects
from legoai.cost.trace.numbers import KINDS
from legoai.cost.trace.records import Allocate, Free, Resize
from legoai.cost.trace.segments import Instance, Segment, outside_index
from legoai.cost.trace.trace import Trace

_FREE: Final = -(2**31)
"""In the place of a slot: a piece of a segment that is free."""

_STORAGE: Final = KINDS.index("storage")

_WORTH: Final = 2
"""Requests for each free block above which it takes less time to compare the free blocks than to serve the requests."""

PoolKey: TypeAlias = tuple[int, bool]
Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""Size of each piece that lies behind the one before it, and the slot of its storage, or `_FREE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What the allocator took for a whole trace, in bytes.

    Attributes:
        peak_reserved: as `torch.cuda.max_memory_reserved()` would say.
        peak_allocated: as `torch.cuda.max_memory_allocated()` would say.
        retries: how often memory ran out and cached segments were given back.
        fits: whether all requests were served.
    """

    peak_reserved: int
    peak_allocated: int
    retries: int
    fits: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the requests of a segment come to.

    Attributes:
        runs: the pieces into which neighbouring blocks turn, by the place of these among those that were found.
        segments: that are taken from the device: the pool, and the pieces into which it is cut.
        reserved: bytes of these.
        allocated: bytes that are in use more, or less, behind it.
        most: bytes that are in use more, at most, while it lasts.
    """

    runs: tuple[tuple[int, Pieces], ...]
    segments: tuple[tuple[PoolKey, Pieces], ...]
    reserved: int
    allocated: int
    most: int


class _Requests:
    """What a segment asks of the allocator.

    Attributes:
        all: in their order: place, bytes, stream; -1 bytes give the storage back. The place is that of the storage's
            number among those that the segment makes, or `~place` among those that it names and does not make.
        pools: from which its storages are served.
        held: slots of storages that have memory behind it, of those that it names.
        outcomes: what the requests came to, by what decides that.
    """

    def __init__(self, segment: Segment) -> None:
        asked: list[tuple[int, int, int]] = []
        held: dict[int, None] = {}
        for record, slot in zip(segment.records, segment.slots, strict=True):
            place = slot // len(KINDS) if slot >= 0 else ~outside_index(slot)
            if isinstance(record, Free | Resize):
                asked.append((place, -1, 0))
                held.pop(slot, None)
            if isinstance(record, Allocate | Resize):
                asked.append((place, record.bytes, record.stream))
                held[slot] = None
        self.all = tuple(asked)
        self.pools = frozenset((stream, round_block(size) <= SMALL) for _, size, stream in asked if size > 0)
        self.held = tuple(held)
        self.outcomes: dict[object, _Outcome] = {}


class RepeatingAllocator(CachingAllocator):
    """An allocator that serves a segment's requests at once where it served them before."""

    def __init__(self, *, capacity: int | None = None) -> None:
        super().__init__(capacity=capacity)
        self.taken: list[Block] = []
        """Segments that were taken from the device since somebody asked."""

    def new_segment(self, wanted: int) -> Block:
        """Take a segment from the device, and note it."""
        block = super().new_segment(wanted)
        self.taken.append(block)
        return block

    def replay(self, instance: Instance) -> None:
        """Serve the requests of an instance of a segment.

        Raises:
            OutOfMemoryError: one of them does not fit.
        """
        requests = instance.segment.summary(_Requests)
        if not requests.all:
            return
        free = sum(len(self.pools[key].blocks) for key in requests.pools if key in self.pools)
        if len(requests.all) <= _WORTH * free:
            self._serve_each(instance, requests)
            return
        key, runs = self._found(instance, requests)
        outcome = requests.outcomes.get(key)
        if outcome is None:
            outcome = self._serve(instance, requests, runs)
            if outcome is not None:
                requests.outcomes[key] = outcome
        elif self.capacity is not None and self.reserved + outcome.reserved > self.capacity:
            self._serve(instance, requests, runs)
        else:
            self._repeat(instance, runs, outcome)

    def _found(self, instance: Instance, requests: _Requests) -> tuple[object, list[tuple[PoolKey, list[Block]]]]:
        """Return what decides what becomes of the requests, and the blocks that may change, neighbours together."""
        given: dict[int, int] = {}
        keys = set(requests.pools)
        ends: list[Block] = []
        for slot in instance.segment.summary(MemoryEffects).changed.slots:
            held = self.used.get(instance.number(slot))
            if held is not None:
                block, pool, small = held
                given[id(block)] = slot
                ends.append(block)
                keys.add((pool.stream, small))
        runs: list[tuple[PoolKey, list[Block]]] = []
        beside: set[int] = set()
        for end in ends:
            if id(end) in beside:
                continue
            first = end
            while first.before is not None and (first.before.free or id(first.before) in given):
                first = first.before
            run = [first]
            while (after := run[-1].after) is not None and (after.free or id(after) in given):
                run.append(after)
            beside.update(map(id, run))
            _, pool, small = self.used[instance.number(given[id(end)])]
            runs.append(((pool.stream, small), run))
        for key in keys:
            if key in self.pools:
                runs += [(key, [one]) for one in self.pools[key].blocks.values() if id(one) not in beside]
        runs.sort(key=lambda item: (item[0], item[1][0].address))
        told = tuple(
            (key, run[0].size)
            if len(run) == 1 and run[0].free
            else (key, *((one.size, given.get(id(one), _FREE)) for one in run))
            for key, run in runs
        )
        return told, runs

    def _serve(
        self, instance: Instance, requests: _Requests, runs: list[tuple[PoolKey, list[Block]]]
    ) -> _Outcome | None:
        """Serve the requests one by one; what they come to, unless memory ran out meanwhile."""
        bounds = [(run[0], run[-1].address + run[-1].size) for _, run in runs]
        before = [((run[0].size, _FREE),) if len(run) == 1 and run[0].free else () for _, run in runs]
        reserved, allocated, retries, peak = self.reserved, self.allocated, self.retries, self.peak_allocated
        self.taken, self.peak_allocated = [], self.allocated
        try:
            self._serve_each(instance, requests)
        finally:
            most = self.peak_allocated - allocated
            self.peak_allocated = max(peak, self.peak_allocated)
        if self.retries != retries:
            return None
        owners = {
            id(held[0]): slot for slot in requests.held if (held := self.used.get(instance.number(slot))) is not None
        }
        changed = []
        for place, (start, end) in enumerate(bounds):
            pieces = tuple(_pieces(start, end, owners))
            if pieces != before[place]:
                changed.append((place, pieces))
        segments = []
        for block in self.taken:
            pieces = tuple(_pieces(block, None, owners))
            segments.append((self._pool_of(block), pieces))
        return _Outcome(tuple(changed), tuple(segments), self.reserved - reserved, self.allocated - allocated, most)

    def _serve_each(self, instance: Instance, requests: _Requests) -> None:
        """Serve the requests one by one."""
        own, outside = instance.own[_STORAGE], instance.outside
        for place, size, stream in requests.all:
            number = own[place] if place >= 0 else outside[~place]
            if size < 0:
                self.free(number)
            else:
                self.allocate(number, size, stream)

    def _pool_of(self, segment: Block) -> PoolKey:
        """Return the pool of a segment, of which it may be free or in instance."""
        for key, pool in self.pools.items():
            block: Block | None = segment
            while block is not None:
                if pool.blocks.get(block.address) is block:
                    return key
                block = block.after
        held = {id(block): (pool.stream, small) for block, pool, small in self.used.values()}
        return held[id(segment)]

    def _repeat(self, instance: Instance, runs: list[tuple[PoolKey, list[Block]]], outcome: _Outcome) -> None:
        """Do at once what the requests come to."""
        for slot in instance.segment.summary(MemoryEffects).changed.slots:
            self.used.pop(instance.number(slot), None)
        for place, pieces in outcome.runs:
            key, run = runs[place]
            pool = self.pools[key]
            for block in run:
                if block.free:
                    pool.remove(block)
            self._cut(instance, key, run[0].address, pieces, run[0].before, run[-1].after)
        for key, pieces in outcome.segments:
            self._cut(instance, key, self.next_address, pieces, None, None)
            self.next_address += sum(size for size, _ in pieces)
        self.peak_allocated = max(self.peak_allocated, self.allocated + outcome.most)
        self.allocated += outcome.allocated
        self.reserved += outcome.reserved
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _cut(  # noqa: PLR0917
        self, instance: Instance, key: PoolKey, address: int, pieces: Pieces, before: Block | None, after: Block | None
    ) -> None:
        """Put pieces in the place of what lay between two blocks."""
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool(key[0])
        for size, slot in pieces:
            block = Block(address, size)
            block.before = before
            if before is not None:
                before.after = block
            if slot == _FREE:
                pool.add(block)
            else:
                block.free = False
                self.used[instance.number(slot)] = block, pool, key[1]
            before, address = block, address + size
        assert before is not None
        before.after = after
        if after is not None:
            after.before = before


def _pieces(start: Block, end: int | None, owners: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the blocks from one on, up to an address, each with the slot of its storage."""
    block: Block | None = start
    while block is not None and (end is None or block.address < end):
        yield block.size, _FREE if block.free else owners[id(block)]
        block = block.after


def reserve(trace: Trace, *, capacity: int | None = None) -> Reserved:
    """Run the storages of a trace through the allocator.

    Args:
        trace: of one rank, from the setup on.
        capacity: bytes of the device that are left for segments; None for no limit.
    """
    allocator = RepeatingAllocator(capacity=capacity)
    fits = True
    try:
        for item in trace.items:
            if isinstance(item, Instance):
                allocator.replay(item)
            elif isinstance(item, Allocate):
                allocator.allocate(item.storage, item.bytes, item.stream)
            elif isinstance(item, Free):
                allocator.free(item.storage)
            elif isinstance(item, Resize):
                allocator.free(item.storage)
                allocator.allocate(item.storage, item.bytes, item.stream)
    except OutOfMemoryError:
        fits = False
    return Reserved(
        peak_reserved=allocator.peak_reserved,
        peak_allocated=allocator.peak_allocated,
        retries=allocator.retries,
        fits=fits,
    )
