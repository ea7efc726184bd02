"""Reserved memory of a trace: its storages in the caching allocator, each pool by itself.

Pools share nothing but the device's capacity, so that where this is enough each is served alone, and what repeats in it
is served once:

- What the requests of a segment come to depends on the free blocks of the pool: on their sizes and their order, and on
  what lies beside the blocks that the segment gives back. Where an instance finds these as an earlier one found them,
  the same happens, at other addresses, and is done at once.
- Where a round of the trace leaves a pool as it found it, so do all further rounds.

Where memory runs out, all pools are served together, request by request, since segments that are given back then are
those of all of them.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.memory.allocator import (
    ADDRESS,
    ADDRESS_BITS,
    BLOCK,
    GIVEN_BACK,
    CachingAllocator,
    OutOfMemoryError,
    Pool,
    PoolKey,
    pool_key,
)
from legoai.cost.trace.numbers import KINDS
from legoai.cost.trace.records import Allocate, Free, Record, Resize
from legoai.cost.trace.rounds import Rounds
from legoai.cost.trace.segments import Instance, Item, Segment, outside_index
from legoai.cost.trace.trace import Trace

_STORAGE: Final = KINDS.index("storage")
_FREE: Final = -(2**31)
"""In the place of a storage's place: a block that is free."""
_WORTH: Final = 2
"""Requests for each free block above which it takes less time to compare the free blocks than to serve the requests."""
_PERIODS: Final = 4
"""Rounds behind which a pool is looked for as it was: small storages may take turns in two places."""

Numbers: TypeAlias = Sequence[int]
"""Of storages: those that an instance makes, and those that it names besides."""
Homes: TypeAlias = tuple[PoolKey | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What the allocator took for a whole trace.

    Attributes:
        peak_reserved: bytes, as `torch.cuda.max_memory_reserved()` would say; without a limit where it does not fit.
        retries: how often memory ran out and cached segments were given back; 0 where it does not fit.
        fits: whether all requests were served.
    """

    peak_reserved: int
    retries: int
    fits: bool


class _Piece(NamedTuple):
    """A block behind an instance, told by what was there before it.

    Attributes:
        block: the index of the block that was there at its address; -1 for a segment that was taken from the device.
        offset: units behind the beginning of that block, or behind the address of the next segment.
        size: units.
        place: of its storage; `_FREE` where it is free.
    """

    block: int
    offset: int
    size: int
    place: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What requests come to.

    Attributes:
        gone: indices of the free blocks that are no longer there.
        pieces: that are there instead.
        segments: that were taken from the device: offset and end of each behind the address of the next segment.
        top: units by which that address is higher.
        reserved: bytes of the segments.
    """

    gone: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    segments: tuple[tuple[int, int], ...]
    top: int
    reserved: int


class _Requests:
    """What some records ask of one pool.

    Attributes:
        places: of the storages, among the numbers of an instance, of each request.
        sizes: in units, or `GIVEN_BACK`.
        ended: places of storages that were there before and are given back.
        held: places of storages of the pool, of those that are named, that are there behind it.
        outcomes: what the requests came to, by what decides that.
    """

    def __init__(self, asked: Sequence[tuple[PoolKey, int, int]]) -> None:
        _, self.places, self.sizes = zip(*asked, strict=True)
        self._pick = itemgetter(*self.places) if len(asked) > 1 else None
        made: set[int] = set()
        ended: dict[int, None] = {}
        for _, place, size in asked:
            if size >= 0:
                made.add(place)
            elif place in made:
                made.remove(place)
            else:
                ended[place] = None
        self.ended, self.held = tuple(ended), tuple(made)
        self.outcomes: dict[tuple[int, ...], _Outcome] = {}

    def handles(self, numbers: Numbers) -> Sequence[int]:
        """Return the storage of each request."""
        return (numbers[self.places[0]],) if self._pick is None else self._pick(numbers)

    def serve(self, pool: Pool, numbers: Numbers) -> None:
        """Serve the requests one by one."""
        pool.serve(self.handles(numbers), self.sizes)

    def replay(self, pool: Pool, numbers: Numbers) -> None:
        """Serve the requests, at once where they were served before."""
        if len(self.sizes) <= _WORTH * len(pool.free):
            self.serve(pool, numbers)
            return
        blocks = [(start, end, _FREE) for start, end in pool.starts.items()]
        for place in self.ended:
            block = pool.used[numbers[place]]
            start = block & ADDRESS
            blocks.append((start, start + (block >> ADDRESS_BITS), place))
        blocks.sort()
        told: list[int] = []
        last = -1
        for start, end, place in blocks:
            told += (end - start, place) if start != last else (-(end - start), place)  # it lies beside the one before
            last = end
        key = tuple(told)
        outcome = self.outcomes.get(key)
        if outcome is None:
            self.outcomes[key] = self._outcome(pool, numbers, blocks)
        else:
            self._repeat(pool, numbers, blocks, outcome)

    def _outcome(self, pool: Pool, numbers: Numbers, blocks: Sequence[tuple[int, int, int]]) -> _Outcome:
        """Serve the requests one by one, and return what they come to."""
        top, reserved, before = pool.top, pool.reserved, dict(pool.starts)
        self.serve(pool, numbers)
        starts = [start for start, _, _ in blocks]

        def piece(start: int, end: int, place: int) -> _Piece:
            if start >= top:
                return _Piece(-1, start - top, end - start, place)
            index = bisect_right(starts, start) - 1
            return _Piece(index, start - starts[index], end - start, place)

        pieces = [piece(start, end, _FREE) for start, end in pool.starts.items() if before.get(start) != end]
        for place in self.held:
            block = pool.used[numbers[place]]
            start = block & ADDRESS
            pieces.append(piece(start, start + (block >> ADDRESS_BITS), place))
        gone = (
            index
            for index, (start, end, place) in enumerate(blocks)
            if place == _FREE and pool.starts.get(start) != end
        )
        taken = ((start - top, end - top) for start, end in pool.segments.items() if start >= top)
        return _Outcome(tuple(gone), tuple(pieces), tuple(taken), pool.top - top, pool.reserved - reserved)

    def _repeat(self, pool: Pool, numbers: Numbers, blocks: Sequence[tuple[int, int, int]], outcome: _Outcome) -> None:
        """Do at once what the requests come to."""
        free, starts, ends, used, top = pool.free, pool.starts, pool.ends, pool.used, pool.top
        for place in self.ended:
            del used[numbers[place]]
        for index in outcome.gone:
            start, end, _ = blocks[index]
            del starts[start], ends[end], free[bisect_left(free, (end - start) << ADDRESS_BITS | start)]
        for index, offset, size, place in outcome.pieces:
            start = offset + (top if index < 0 else blocks[index][0])
            if place == _FREE:
                starts[start] = start + size
                ends[start + size] = start
                insort(free, size << ADDRESS_BITS | start)
            else:
                used[numbers[place]] = size << ADDRESS_BITS | start
        pool.segments.update((top + start, top + end) for start, end in outcome.segments)
        pool.top += outcome.top
        pool.reserved += outcome.reserved


Routed: TypeAlias = tuple[tuple[PoolKey, _Requests], ...]
"""Requests, by the pools that serve them."""


class _Route(NamedTuple):
    """Where the requests of a segment go.

    Attributes:
        apart: those of each pool by itself.
        in_order: those that follow each other in one pool together.
        homes: places of the storages that are changed, with their pools behind it; None of those without memory.
    """

    apart: Routed
    in_order: Routed
    homes: tuple[tuple[int, PoolKey | None], ...]


class _Routes:
    """The pools that a segment's requests go to, which depends on those of the storages that it gives back.

    The place of a storage is its index among those that an instance makes, or `~index` among those that it names.

    Attributes:
        asked: the records that ask for something, each with the place of its storage.
        named: places of storages that are there before it and are given back.
    """

    def __init__(self, segment: Segment) -> None:
        self.asked: list[tuple[int, Record]] = []
        made: set[int] = set()
        named: dict[int, None] = {}
        for record, slot in zip(segment.records, segment.slots, strict=True):
            if isinstance(record, Allocate | Free | Resize):
                place = slot // len(KINDS) if slot >= 0 else ~outside_index(slot)
                self.asked.append((place, record))
                if isinstance(record, Allocate):
                    made.add(place)
                elif place not in made:
                    named[place] = None
        self.named = tuple(named)
        self.known: dict[Homes, _Route] = {}

    def of(self, homes: Homes) -> _Route:
        """Return the route where the storages of `named` are in some pools."""
        found = self.known.get(homes)
        if found is None:
            found = self.known[homes] = _route(self.asked, dict(zip(self.named, homes, strict=True)))
        return found


def _route(asked: Sequence[tuple[int, Record]], homes: dict[int, PoolKey | None]) -> _Route:
    """Return the route of some records, each with a place, where storages that are there before them have pools."""
    requests: list[tuple[PoolKey, int, int]] = []
    for place, record in asked:
        if isinstance(record, Free | Resize):
            home = homes[place]
            homes[place] = None
            if home is not None:
                requests.append((home, place, GIVEN_BACK))
        if isinstance(record, Allocate | Resize):
            homes[place] = home = pool_key(record.stream, record.bytes) if record.bytes else None
            if home is not None:
                requests.append((home, place, -(-record.bytes // BLOCK)))
    apart: defaultdict[PoolKey, list[tuple[PoolKey, int, int]]] = defaultdict(list)
    for one in requests:
        apart[one[0]].append(one)
    in_order = itertools.groupby(requests, key=itemgetter(0))
    return _Route(
        tuple((key, _Requests(found)) for key, found in apart.items()),
        tuple((key, _Requests(list(found))) for key, found in in_order),
        tuple(homes.items()),
    )


@functools.cache
def _alone(stream: int | None, size: int, home: PoolKey | None) -> _Route:
    """Return the route of a record by itself.

    Args:
        stream: that asks for memory; None where it is given back.
        size: bytes that are asked for.
        home: pool of the storage before it; None where it has no memory.
    """
    return _route([(0, Free(0) if stream is None else Resize(0, size, stream))], {0: home})


def _numbers(item: Item) -> Numbers:
    """The numbers of an item's storages, at their places."""
    if isinstance(item, Instance):
        return (*item.own[_STORAGE], *item.outside[::-1])
    return (item.storage,) if isinstance(item, Allocate | Free | Resize) else ()


class _Router:
    """Follows the pools of storages through a trace.

    Attributes:
        homes: of the storages that were met.
    """

    def __init__(self) -> None:
        self.homes: dict[int, PoolKey | None] = {}

    def route(self, item: Item, numbers: Numbers) -> _Route | None:
        """Return the route of the next item; None where it asks for nothing."""
        homes = self.homes
        if isinstance(item, Instance):
            routes = item.segment.summary(_Routes)
            if not routes.asked:
                return None
            route = routes.of(tuple([homes[numbers[place]] for place in routes.named]))
        elif isinstance(item, Free):
            route = _alone(None, 0, homes[item.storage])
        elif isinstance(item, Allocate | Resize):
            route = _alone(item.stream, item.bytes, homes.get(item.storage))
        else:
            return None
        self.follow(route, numbers)
        return route

    def follow(self, route: _Route, numbers: Numbers) -> None:
        """Take note of the pools of storages behind a route."""
        for place, home in route.homes:
            self.homes[numbers[place]] = home


class _Work(NamedTuple):
    """What is asked of one pool, in the order of the trace.

    Attributes:
        before: the rounds, or all of it.
        round: requests of a round, each with the index of its item there.
        behind: the rounds.
    """

    before: list[tuple[_Requests, Numbers]]
    round: list[tuple[_Requests, int]]
    behind: list[tuple[_Requests, Numbers]]


def _by_pool(items: Sequence[Item], rounds: Rounds) -> dict[PoolKey, _Work]:
    """Return what is asked of each pool; all rounds ask the same."""
    found: defaultdict[PoolKey, _Work] = defaultdict(lambda: _Work([], [], []))
    router = _Router()
    for index in (*range(rounds.first + rounds.length), *range(rounds.stop, len(items))):
        item = items[index]
        numbers = _numbers(item)
        route = router.route(item, numbers)
        if route is None:
            continue
        for key, requests in route.apart:
            work = found[key]
            if index < rounds.first:
                work.before.append((requests, numbers))
            elif index >= rounds.stop:
                work.behind.append((requests, numbers))
            else:
                work.round.append((requests, index - rounds.first))
        if rounds.first <= index < rounds.stop:  # what lives on of the last of them is named behind it
            router.follow(route, _numbers(items[index + rounds.stop - rounds.first - rounds.length]))
    return found


def _served(work: _Work, items: Sequence[Item], rounds: Rounds, *, small: bool) -> int:
    """Serve what is asked of one pool; return the bytes that it reserves."""
    pool = Pool(small=small)
    for requests, numbers in work.before:
        requests.replay(pool, numbers)
    seen: deque[tuple[int, list[int], dict[int, int]]] = deque(maxlen=_PERIODS)
    done = 0
    while work.round and done < rounds.count:
        for period, (top, free, used) in enumerate(seen, 1):
            if (top, free) == (pool.top, pool.free):
                moved = rounds.moved(used, pool.used, period)
                more = (rounds.count - done) // period * period
                if moved is not None and more:
                    for number in moved:
                        pool.used[number + more * rounds.shift] = pool.used.pop(number)
                    done += more
                    seen.clear()
                    break
        else:
            seen.appendleft((pool.top, list(pool.free), dict(pool.used)))
            start = rounds.first + done * rounds.length
            for requests, place in work.round:
                requests.replay(pool, _numbers(items[start + place]))
            done += 1
    for requests, numbers in work.behind:
        requests.replay(pool, numbers)
    return pool.reserved


def reserve(trace: Trace, *, capacity: int | None = None) -> Reserved:
    """Run the storages of a trace through the allocator.

    Args:
        trace: of one rank, from the setup on.
        capacity: bytes of the device that are left for segments; None for no limit.
    """
    items = trace.items
    rounds = Rounds(first=len(items), length=0, count=0, shift=0)
    if trace.rounds is not None and trace.rounds.count > 1:
        # What the first of them names was made before it, and not by one like it.
        rounds = trace.rounds.behind_first
    works = _by_pool(items, rounds)
    reserved = sum(_served(work, items, rounds, small=key[1]) for key, work in works.items())
    if capacity is None or reserved <= capacity:
        return Reserved(peak_reserved=reserved, retries=0, fits=True)
    allocator = CachingAllocator(capacity=capacity)
    router = _Router()
    try:
        for item in items:
            numbers = _numbers(item)
            route = router.route(item, numbers)
            for key, requests in () if route is None else route.in_order:
                requests.serve(allocator.pool(key), numbers)
    except OutOfMemoryError:
        return Reserved(peak_reserved=reserved, retries=0, fits=False)
    return Reserved(peak_reserved=allocator.peak_reserved, retries=allocator.retries, fits=True)
