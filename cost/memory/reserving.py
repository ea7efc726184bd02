"""Reserved memory of a trace: its storages in the caching allocator, each pool on its own.

Pools share nothing but the device's capacity. Where the capacity suffices, each pool is therefore served alone, and
repetition in it is served once:

- The outcome of requests depends on the free blocks of the pool, and on the blocks that are freed. Where a pool is in
  the same state as when the same requests were made before, for example a micro batch earlier, the same blocks are used
  without a search of the free ones.
- Where a round of the trace leaves a pool in the state in which it found it, so do all further rounds.

Where memory runs out, all pools are served together, request by request, because the allocator then frees cached
segments of all of them.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.memory.allocator import (
    GIVEN_BACK,
    SMALL,
    CachingAllocator,
    OutOfMemoryError,
    Pool,
    PoolKey,
)
from legoai.cost.memory.effects import MemoryEffects, Slots, block_of, bytes_of, stream_of
from legoai.cost.memory.expandable import ExpandablePool
from legoai.cost.memory.following import Followed, Seen
from legoai.cost.trace.records import Allocate, Free, Resize
from legoai.cost.trace.rounds import Rounds
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.cost.trace.trace import Trace
from legoai.specs.allocator import BLOCK

_PERIODS: Final = 4
"""Rounds after which a pool is compared with its earlier state: small storages may alternate between two addresses."""

Homes: TypeAlias = tuple[PoolKey | None, ...]
Asked: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Result of the allocator for a whole trace.

    Attributes:
        peak_reserved: bytes, as of `torch.cuda.max_memory_reserved()`; where the trace does not fit, without a limit.
        retries: how often memory ran out and cached segments were freed; 0 where the trace does not fit.
        fits: whether all requests were served.
    """

    peak_reserved: int
    retries: int
    fits: bool


class _Requests:
    """Requests of some records to one pool.

    Attributes:
        slots: of the storages, of each request.
        sizes: in units, or `GIVEN_BACK`.
        ended: slots of storages that existed before and are freed.
        held: slots of those storages of the pool that are alive afterwards.
        asked: the requests, independent of slots.
    """

    def __init__(self, asked: Sequence[tuple[PoolKey, int, int]]) -> None:
        _, self.slots, self.sizes = zip(*asked, strict=True)
        made: dict[int, None] = {}
        ended: dict[int, None] = {}
        for _, slot, size in asked:
            if size >= 0:
                made[slot] = None
            elif slot in made:
                del made[slot]
            else:
                ended[slot] = None
        self.ended, self.held = Slots(ended), Slots(made)
        order: dict[int, int] = {}
        named = (self.slots, self.ended.slots, self.held.slots)
        self.asked: Asked = (
            self.sizes, *(tuple(order.setdefault(slot, len(order)) for slot in slots) for slots in named)
        )  # fmt: skip

    def serve(self, pool: Pool, blocks: Sequence[int]) -> tuple[int, ...]:
        """Serve the requests in order.

        Args:
            pool: that serves them.
            blocks: the blocks of :attr:`ended`.

        Returns:
            The blocks of :attr:`held`.
        """
        used = dict(zip(self.ended.slots, blocks, strict=True))
        pool.serve(self.slots, self.sizes, used)
        return tuple([used[slot] for slot in self.held.slots])


def _numbers(slots: Slots, item: Item) -> tuple[int, ...]:
    """The numbers of slots in an item."""
    if isinstance(item, Instance):
        return slots.numbers(item)
    assert isinstance(item, Allocate | Free | Resize)
    return (item.storage,) * len(slots.slots)


class _Step(NamedTuple):
    """Requests that a pool has served, with its state.

    Attributes:
        asked: the requests.
        given_back: the freed blocks of storages that existed before.
        top: address of the next segment before them.
        free: the free blocks before them.
        held: the blocks of the storages that are alive after them.
    """

    asked: Asked
    given_back: tuple[int, ...]
    top: int
    free: list[int]
    held: tuple[int, ...]


class _Served:
    """A pool on its own, with a history of the requests that it served.

    While the pool repeats its history, only the blocks in use are updated; the free blocks are those recorded before a
    known step.

    Args:
        pool: without blocks.

    Attributes:
        pool: its blocks in use; its free blocks too, unless it repeats its history.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._steps: list[_Step] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._at: int | None = None

    @property
    def free(self) -> list[int]:
        """The free blocks."""
        return self.pool.free if self._at is None else self._steps[self._at].free

    def serve(self, requests: _Requests, item: Item) -> None:
        """Serve the requests of an item."""
        used, steps = self.pool.used, self._steps
        blocks = tuple([used.pop(number) for number in _numbers(requests.ended, item)])
        if self._at is not None and self._is(self._at, requests, blocks):
            known: int | None = self._at
        else:
            free, top = self.free, self.pool.top
            key = (len(requests.sizes), requests.sizes[0], len(free), top, *free[-1:], *free[:1], *blocks)
            known = self._known.get(key)
            if known is None or not self._is(known, requests, blocks) or steps[known].free != free:
                known = None
                if self._at is not None:
                    # The next request does not continue the last step; a step with no requests keeps the two apart.
                    steps.append(_Step((), (), top, list(self.pool.free), ()))
                    self.pool.put(free)
                    self._at = None
                self._known[key] = len(steps)
                before = list(free)
                held = requests.serve(self.pool, blocks)
                steps.append(_Step(requests.asked, blocks, top, before, held))
        if known is not None:
            held = steps[known].held
            # After the last step, the free blocks are those of the pool.
            self._at = known + 1 if known + 1 < len(steps) else None
        used.update(zip(_numbers(requests.held, item), held, strict=True))

    def _is(self, place: int, requests: _Requests, blocks: tuple[int, ...]) -> bool:
        """Whether a step had the same requests and freed the same blocks."""
        step = self._steps[place]
        return step.given_back == blocks and (step.asked is requests.asked or step.asked == requests.asked)


Routed: TypeAlias = tuple[tuple[PoolKey, _Requests], ...]
"""Requests, by the pools that serve them."""


class _Route:
    """Assignment of requests to pools.

    Args:
        asked: each with its pool, the slot of its storage, and its size in units or `GIVEN_BACK`.

    Attributes:
        apart: the requests of each pool.
    """

    def __init__(self, asked: Sequence[tuple[PoolKey, int, int]]) -> None:
        self._asked = asked
        apart: defaultdict[PoolKey, list[tuple[PoolKey, int, int]]] = defaultdict(list)
        for one in asked:
            apart[one[0]].append(one)
        self.apart: Routed = tuple((key, _Requests(found)) for key, found in apart.items())

    @functools.cached_property
    def in_order(self) -> Routed:
        """Requests in order; consecutive requests of one pool are joined."""
        return tuple((key, _Requests(list(found))) for key, found in itertools.groupby(self._asked, itemgetter(0)))


class _Routes:
    """The pools of a segment's requests, which depend on the pools of the storages that it frees."""

    def __init__(self, segment: Segment) -> None:
        effects = segment.summary(MemoryEffects)
        self._asked = [(one.slot, one.block) for one in effects.changes]
        self._named = effects.changed.slots
        self._known: dict[Homes, _Route] = {}

    def of(self, before: Sequence[int]) -> _Route:
        """Return the route of an instance, given the blocks of the storages that it changes."""
        homes = tuple(map(_home, before))
        found = self._known.get(homes)
        if found is None:
            found = self._known[homes] = _route(self._asked, dict(zip(self._named, homes, strict=True)))
        return found


def _home(block: int | None) -> PoolKey | None:
    """Return the pool of a storage's block; None for a block without memory."""
    size = 0 if block is None else bytes_of(block)
    return None if block is None or not size else (stream_of(block), size <= SMALL)


def _route(asked: Sequence[tuple[int, int | None]], homes: dict[int, PoolKey | None]) -> _Route:
    """Return the route of requests.

    Args:
        asked: slots of storages, each with its block after the request; None where it is freed.
        homes: pools of the storages that existed before, by slot.
    """
    requests: list[tuple[PoolKey, int, int]] = []
    for slot, block in asked:
        before, home = homes.get(slot), _home(block)
        if before is not None:
            requests.append((before, slot, GIVEN_BACK))
        if home is not None and block is not None:
            requests.append((home, slot, bytes_of(block) // BLOCK))
        homes[slot] = home
    return _Route(requests)


@functools.cache
def _alone(before: int | None, behind: int | None) -> _Route:
    """Return the route of a single record, given the blocks of its storage before and after it."""
    return _route([(0, behind)], {0: _home(before)})


def _routes(seen: Sequence[Seen]) -> dict[int, _Route]:
    """Return the routes of the items that make requests, by the items' indices."""
    found: dict[int, _Route] = {}
    of_effects: dict[int, _Route] = {}
    for one in seen:
        item = one.item
        if one.effect is not None and isinstance(item, Instance):
            route = of_effects.get(id(one.effect))
            if route is None:
                route = of_effects[id(one.effect)] = item.segment.summary(_Routes).of(one.effect.before)
            if route.apart:
                found[one.place] = route
        elif isinstance(item, Allocate | Free | Resize):
            found[one.place] = _alone(one.had, None if isinstance(item, Free) else block_of(item.bytes, item.stream))
    return found


class _Work(NamedTuple):
    """Requests to one pool in the order of the trace, each with the index of its item.

    Attributes:
        before: requests before the rounds; all requests where there are no rounds.
        round: requests of a round, with indices counted from its start.
        behind: requests after the rounds.
    """

    before: list[tuple[_Requests, int]]
    round: list[tuple[_Requests, int]]
    behind: list[tuple[_Requests, int]]


def _by_pool(routes: dict[int, _Route], rounds: Rounds) -> dict[PoolKey, _Work]:
    """Return the requests of each pool; all rounds make the same ones."""
    found: defaultdict[PoolKey, _Work] = defaultdict(lambda: _Work([], [], []))
    for place, route in routes.items():
        for key, requests in route.apart:
            work = found[key]
            if place < rounds.first:
                work.before.append((requests, place))
            elif place >= rounds.stop:
                work.behind.append((requests, place))
            elif place < rounds.first + rounds.length:
                work.round.append((requests, place - rounds.first))
    return found


def _served(work: _Work, items: Sequence[Item], rounds: Rounds, pool: Pool) -> int:
    """Serve the requests of one pool; return the bytes that it reserves."""
    served = _Served(pool)
    for requests, place in work.before:
        served.serve(requests, items[place])
    seen: deque[tuple[int, list[int], dict[int, int]]] = deque(maxlen=_PERIODS)
    done = 0
    while work.round and done < rounds.count:
        for period, (top, free, used) in enumerate(seen, 1):
            if (top, free) == (pool.top, served.free):
                moved = rounds.moved(used, pool.used, period)
                more = (rounds.count - done) // period * period
                if moved is not None and more:
                    for number in moved:
                        pool.used[number + more * rounds.shift] = pool.used.pop(number)
                    done += more
                    seen.clear()
                    break
        else:
            seen.appendleft((pool.top, list(served.free), dict(pool.used)))
            start = rounds.first + done * rounds.length
            for requests, place in work.round:
                served.serve(requests, items[start + place])
            done += 1
    for requests, place in work.behind:
        served.serve(requests, items[place])
    return pool.reserved


def reserve(trace: Trace, *, capacity: int | None = None, expandable: bool = False) -> Reserved:
    """Run the storages of a trace through the allocator.

    Args:
        trace: of one rank, from the setup on.
        capacity: bytes of the device available for segments; None for no limit.
        expandable: whether segments grow (:mod:`legoai.cost.memory.expandable`).
    """
    kind = ExpandablePool if expandable else Pool
    items, seen = trace.items, trace.summary(Followed).seen
    rounds = Rounds(first=len(items), length=0, count=0, shift=0)
    if trace.rounds is not None and trace.rounds.count > 1:
        # The first round may use storages that were allocated before it, and not by a round.
        rounds = trace.rounds.behind_first
    routes = _routes(seen)
    works = _by_pool(routes, rounds)
    reserved = sum(_served(work, items, rounds, kind(small=key[1])) for key, work in works.items())
    if capacity is None or reserved <= capacity:
        return Reserved(peak_reserved=reserved, retries=0, fits=True)
    # Active memory is reserved at least.
    active = max(one.behind if one.effect is None else one.before + one.effect.most for one in seen)
    allocator = CachingAllocator(capacity=capacity, kind=kind)
    found = None if active > capacity else _together(items, routes, rounds, allocator)
    return Reserved(peak_reserved=reserved, retries=0, fits=False) if found is None else found


def _together(
    items: Sequence[Item], routes: dict[int, _Route], rounds: Rounds, allocator: CachingAllocator
) -> Reserved | None:
    """Serve all pools together; None where a request does not fit."""
    try:
        for place, item in enumerate(items):
            same = place  # index in the first of the rounds
            if rounds.first <= place < rounds.stop:
                same = rounds.first + (place - rounds.first) % rounds.length
            route = routes.get(same)
            for key, requests in () if route is None else route.in_order:
                pool = allocator.pool(key)
                blocks = [pool.used.pop(number) for number in _numbers(requests.ended, item)]
                held = requests.serve(pool, blocks)
                pool.used.update(zip(_numbers(requests.held, item), held, strict=True))
    except OutOfMemoryError:
        return None
    return Reserved(peak_reserved=allocator.peak_reserved, retries=allocator.retries, fits=True)
