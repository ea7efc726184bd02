"""Allocator pools in a state seen before: repeated requests are served from the recorded result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.cost.memory.allocator import GIVEN_BACK, CachingAllocator, OutOfMemoryError, Pool
from legoai.cost.memory.expandable import ExpandablePool
from legoai.cost.memory.reserving import Reserved, reserve
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Allocate, Free, Mark
from legoai.cost.trace.segments import Instance, first_instance
from legoai.cost.trace.trace import Trace
from legoai.specs.allocator import BLOCK
from support.simulation.allocator import pool_key

MIB = 2**20
EACH = 1000
"""Numbers of one instance."""
LEFT = 2
"""Storages that an instance leaves, which the next one gives back."""
SIZES = st.sampled_from([512, 4096, MIB // 3, MIB, MIB + 512, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB, 64 * MIB])


def allocate(storage: int, size: int, stream: int = 0) -> Allocate:
    return Allocate(storage=storage, bytes=size, stream=stream, category="activation", module="", phase="forward")


@st.composite
def instances(draw) -> Instance:
    """The first instance of some records, which leave as many storages as they are left."""
    sizes = draw(st.lists(SIZES, min_size=LEFT, max_size=10))
    waiting = [number - EACH for number in range(LEFT)]
    records: list = []
    held = []
    for number, size in enumerate(sizes):
        records.append(allocate(number, size))
        if number >= LEFT:
            held.append(number)
        while held and draw(st.booleans()):
            records.append(Free(held.pop(draw(st.integers(0, len(held) - 1)))))
        if waiting and draw(st.booleans()):
            records.append(Free(waiting.pop()))
    return first_instance([*records, *map(Free, waiting), *map(Free, held)])


def trace_of(found: Sequence[Instance]) -> Trace:
    """A trace in which instances of these segments follow each other, by themselves and all of them twice."""
    items: list = [Mark("step 1"), *(allocate(number - EACH, 3 * MIB) for number in range(LEFT))]
    order = [*found, *found]
    for place, one in enumerate(order):
        own = tuple(tuple(number + EACH * place for number in numbers) for numbers in one.own)
        items.append(Instance(one.segment, own, tuple(number + EACH * place for number in one.outside)))
    items += [*(Free(number + EACH * (len(order) - 1)) for number in range(LEFT)), Mark("end step 1")]
    return Trace(rank=0, world=1, stage=0, items=tuple(items))


def one_by_one(trace: Trace, capacity: int | None, *, expandable: bool) -> Reserved | None:
    """The same with individual records; None if it does not fit."""
    allocator = CachingAllocator(capacity=capacity, kind=ExpandablePool if expandable else Pool)
    pools: dict[int, Pool] = {}
    try:
        for item in trace.records:
            if isinstance(item, Allocate):
                pools[item.storage] = pool = allocator.pool(pool_key(item.stream, item.bytes))
                pool.serve([item.storage], [-(-item.bytes // BLOCK)])
            elif isinstance(item, Free):
                pools[item.storage].serve([item.storage], [GIVEN_BACK])
    except OutOfMemoryError:
        return None
    return Reserved(peak_reserved=allocator.peak_reserved, retries=allocator.retries, fits=True)


@given(
    st.lists(instances(), min_size=1, max_size=3).flatmap(lambda kinds: st.lists(st.sampled_from(kinds), max_size=9))
)
@settings(max_examples=300)
def test_repeated_requests_equal_individual_requests(found):
    trace = trace_of(found)
    for expandable in (False, True):
        whole = reserve(trace, expandable=expandable)
        assert whole == one_by_one(trace, None, expandable=expandable)
        for capacity in (80 * MIB, 120 * MIB, 180 * MIB):
            expected = one_by_one(trace, capacity, expandable=expandable)
            assert reserve(trace, capacity=capacity, expandable=expandable) == (
                expected or Reserved(peak_reserved=whole.peak_reserved, retries=0, fits=False)
            )
    flat = Trace(rank=0, world=1, stage=0, items=tuple(trace.records))
    mine, theirs = memory(trace), memory(flat)
    assert replace(mine, live=()) == replace(theirs, live=())
    assert [one.bytes for one in mine.live] == [one.bytes for one in theirs.live]
    assert memory(trace, tables=False) == replace(mine, live=(), by_module={})


def test_known_pool_state_is_not_simulated_again(monkeypatch):
    one = first_instance([
        allocate(0, 33 * MIB), allocate(1, 3 * MIB), allocate(2, 512), Free(-EACH), Free(1 - EACH), Free(2)
    ])  # fmt: skip
    served = []
    serve = Pool.serve
    monkeypatch.setattr(Pool, "serve", lambda pool, *asked: served.append(1) or serve(pool, *asked))
    few = reserve(trace_of([one] * 5))
    asked = len(served)
    assert reserve(trace_of([one] * 500)) == few
    assert len(served) <= 2 * asked
