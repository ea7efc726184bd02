"""Rounds of a trace: simulating a few of the equal micro batches gives the same result as all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from legoai.cost.memory.allocator import Pool
from legoai.cost.memory.reserving import reserve
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Allocate, Free, Mark, Resize
from legoai.cost.trace.rounds import Rounds
from legoai.cost.trace.segments import Instance, first_instance
from legoai.cost.trace.trace import Trace

MIB = 2**20
SHIFT = 1000
SIZES = st.sampled_from([0, 512, 4096, MIB // 3, MIB, MIB + 512, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB, 64 * MIB])


def allocate(storage: int, size: int, stream: int = 0) -> Allocate:
    return Allocate(storage=storage, bytes=size, stream=stream, category="activation", module="", phase="forward")


@st.composite
def rounds(draw) -> list:
    """Records of a round, which also frees allocations of the previous round."""
    made = draw(st.lists(st.tuples(SIZES, st.integers(0, 1)), min_size=1, max_size=12))
    left = draw(st.sets(st.sampled_from(range(len(made))), max_size=3))
    records: list = []
    waiting = [number - SHIFT for number in left]  # of the round before it
    held = []
    for number, (size, stream) in enumerate(made):
        records.append(allocate(number, size, stream))
        if number not in left:
            held.append(number)
        while held and draw(st.booleans()):
            records.append(Free(held.pop(draw(st.integers(0, len(held) - 1)))))
        if waiting and draw(st.booleans()):
            records.append(Free(waiting.pop()))
        if draw(st.integers(0, 5)) == 0:
            records.append(Resize(-1, draw(SIZES), 0))
    return [*records, *map(Free, waiting), *map(Free, held)]


def trace_of(one: list, count: int) -> Trace:
    """A trace of rounds with a shared storage, preceded by the allocations that the first round frees."""
    fixed = allocate(10**9, 5 * MIB)
    instance = first_instance(
        [item if getattr(item, "storage", 0) != -1 else Resize(10**9, item.bytes, 0) for item in one]
    )
    sizes = {item.storage: item for item in one if isinstance(item, Allocate)}
    named = [number for number in instance.outside if number < 0]
    before = [allocate(number, sizes[number + SHIFT].bytes, sizes[number + SHIFT].stream) for number in named]
    items: list = [Mark("step 1"), fixed, *before]
    first = len(items)
    for index in range(count):
        own = tuple(tuple(number + SHIFT * index for number in numbers) for numbers in instance.own)
        outside = tuple(number if number == 10**9 else number + SHIFT * index for number in instance.outside)
        items += [Mark(f"micro batch {index}"), Instance(instance.segment, own, outside)]
    last = [number + SHIFT * count for number in named]
    items += [allocate(10**9 + 1, 7 * MIB), *map(Free, last), Free(10**9), Mark("end step 1")]
    found = Rounds(first=first, length=2, count=count, shift=SHIFT)
    return Trace(rank=0, world=1, stage=0, items=tuple(items), rounds=found)


@given(rounds(), st.integers(1, 9))
@settings(max_examples=200)
def test_rounds_equal_their_expanded_records(one, count):
    trace = trace_of(one, count)
    flat = Trace(rank=0, world=1, stage=0, items=tuple(trace.records))
    assert reserve(trace) == reserve(flat)
    for capacity in (60 * MIB, 100 * MIB, 150 * MIB):
        assert reserve(trace, capacity=capacity) == reserve(flat, capacity=capacity)
    mine, theirs = memory(trace), memory(flat)
    assert replace(mine, live=()) == replace(theirs, live=())
    assert [item.bytes for item in mine.live] == [item.bytes for item in theirs.live]


def test_repeated_rounds_are_simulated_a_few_times(monkeypatch):
    one = [allocate(0, 33 * MIB), allocate(1, 512), Free(0), Free(1 - SHIFT)]
    served = []
    serve = Pool.serve
    monkeypatch.setattr(Pool, "serve", lambda pool, *asked: served.append(1) or serve(pool, *asked))
    few = reserve(trace_of(one, 9))
    asked = len(served)
    assert reserve(trace_of(one, 999)) == few
    assert len(served) - asked <= asked + 4


def test_shifted_pool_state_is_recognised():
    two = Rounds(first=0, length=1, count=9, shift=SHIFT)
    assert two.moved({1: 512, 7: 0}, {1: 512, 7 + SHIFT: 0}, 1) == [7 + SHIFT]
    assert two.moved({1: 512, 7: 0}, {1: 512, 7 + 2 * SHIFT: 0}, 2) == [7 + 2 * SHIFT]
    assert two.moved({1: 512}, {1: 512}, 1) == []
    assert two.moved({1: 512, 7: 0}, {1: 512, 7 + SHIFT: 512}, 1) is None
    assert two.moved({1: 512, 7: 0}, {1: 512}, 1) is None
