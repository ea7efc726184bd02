"""A trace that is composed of segments is the trace of its records."""

from __future__ import annotations

import pickle

from legoai.cost.memory.effects import MemoryEffects
from legoai.cost.memory.reserving import reserve
from legoai.cost.memory.storages import memory
from legoai.cost.timing.engine import simulate
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.records import Allocate, Free, Kernel, Mark, Record, RecordEvent, Resize, WaitEvent
from legoai.cost.trace.segments import Instance, first_instance
from legoai.cost.trace.trace import Trace
from legoai.cost.trace.translation import Translation


def allocate(storage: int, size: int = 1024) -> Allocate:
    return Allocate(storage=storage, bytes=size, stream=0, category="activation", module="layers.0", phase="forward")


def kernel(module: str = "layers.0") -> Kernel:
    return Kernel(stream=0, op="aten.mm", inputs=(), outputs=(), flops=2, bytes_read=0, bytes_written=0, attributes={},
                  module=module, phase="forward")  # fmt: skip


def block(before: int, own: int, event: int) -> list[Record]:
    """A block that reads and frees the output of the previous one."""
    return [allocate(own), kernel(), RecordEvent(event, 0), WaitEvent(1, event), Resize(own, 2048), Free(before)]


def composed() -> tuple[Trace, list[Record]]:
    """A trace of two instances of a block, and its records one by one."""
    first = first_instance(block(0, 1, 0))
    second = Instance(first.segment, ((2,), (), (1,)), (1,))
    start, end = [Mark("step 1"), allocate(0)], [Free(2), Mark("end step 1")]
    trace = Trace(rank=0, world=1, stage=0, items=[*start, first, second, *end])
    return trace, [*start, *block(0, 1, 0), *block(1, 2, 1), *end]


def test_segmented_trace_has_the_records_of_its_segments():
    trace, records = composed()
    assert list(trace.records) == records
    assert [trace.records[index] for index in range(len(records))] == records
    assert trace == Trace(rank=0, world=1, stage=0, items=records)
    assert trace.steps == [range(len(records))]
    assert list(trace.between(trace.steps[0])) == list(trace.items)


def test_repeated_segment_is_stored_once():
    trace, records = composed()
    assert len(list(trace.once_each())) == len(records) - len(block(0, 1, 0))
    first, second = (item for item in trace.items if isinstance(item, Instance))
    effects = first.segment.summary(MemoryEffects)
    assert second.segment.summary(MemoryEffects) is effects and len(effects.changed.slots) == 1


def test_memory_of_a_segmented_trace_equals_its_records():
    trace, records = composed()
    flat = Trace(rank=0, world=1, stage=0, items=records)
    assert memory(trace) == memory(flat) and memory(trace).peak == 4096
    assert reserve(trace) == reserve(flat)


def test_segments_are_translated_to_another_rank():
    trace, _ = composed()
    translation = Translation({"layers.0": "layers.7"}, {}, range(1), 0)
    other = Trace(rank=1, world=2, stage=1, items=trace.items, translation=translation)
    modules = {item.module for item in other.records if isinstance(item, Kernel)}
    assert modules == {"layers.7"}


def test_instance_has_its_own_module_names():
    trace, records = composed()
    start, first, second, end = trace.items[:2], trace.items[2], trace.items[3], trace.items[4:]
    elsewhere = Translation({"layers.0": "layers.1"}, {}, range(0), 0)
    named = Trace(
        rank=0, world=1, stage=0,
        items=[*start, first, Instance(second.segment, second.own, second.outside, elsewhere), *end],
    )  # fmt: skip
    other = [elsewhere.record(record) for record in block(1, 2, 1)]
    flat = Trace(rank=0, world=1, stage=0, items=[*start, *block(0, 1, 0), *other, *end])
    assert named == flat and [named.records[index] for index in range(len(records))] == list(flat.records)
    assert memory(named) == memory(flat) and memory(named).by_module["layers.1"] == 2048
    assert pickle.loads(pickle.dumps(named)) == flat


def test_segmented_trace_is_timed_as_its_records():
    trace, records = composed()
    flat = Trace(rank=0, world=1, stage=0, items=records)
    ours, theirs = (simulate(one, price, Host(dispatch_seconds=0.3)) for one in (trace, flat))
    assert list(ours.intervals) == list(theirs.intervals) and len(ours.intervals) == 2
    assert (ours.end, ours.marks) == (theirs.end, theirs.marks)


def price(_: object) -> Cost:
    return Cost(seconds=1.0, resource="compute", model="test")


def test_trace_survives_pickling():
    trace, _ = composed()
    memory(trace)
    assert pickle.loads(pickle.dumps(trace)) == trace
