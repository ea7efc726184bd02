"""Runs of kernels that are simulated as one take as long as one by one."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from typing import Any

import pytest

from legoai.cost.timing.engine import simulate
from legoai.cost.timing.timeline import Beside, Cost, Host, Timeline
from legoai.cost.trace.records import Collective, Kernel, Mark, RecordEvent, WaitEvent, WaitWork
from legoai.cost.trace.segments import first_instance
from legoai.cost.trace.trace import Trace
from support.simulation.random_traces import HOSTS, Program, price


def kernel(seconds: float, *, stream: int = 0, beside: float = 1.0, op: str = "aten.add", phase: Any = "forward"):
    return Kernel(
        stream=stream, op=op, inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0,
        attributes={"seconds": seconds, "beside": beside}, module="", phase=phase,
    )  # fmt: skip


def collective(work: int, seconds: float, *, stream: int = 1) -> Collective:
    return Collective(
        work=work, stream=stream, kind="all_gather", ranks=(0, 1), axis="dp_shard", bytes=round(seconds * 1e6),
        dtype="uint8", module="", phase="forward",
    )  # fmt: skip


def cost(record: Any) -> Cost:
    if isinstance(record, Kernel):
        given = record.attributes
        beside = None if given["beside"] is None else Beside(given["beside"])
        return Cost(seconds=given["seconds"], resource="compute", model="given", beside=beside)
    return Cost(seconds=record.bytes / 1e6, resource="intra_host", model="given")


def both(*records: Any, price: Any = cost, **host: Any) -> tuple[Timeline, Timeline]:
    """The timelines of a segment kernel by kernel, and by run."""
    trace = Trace(rank=0, world=2, stage=0, items=(first_instance(records),))
    first, second = (simulate(trace, price, Host(**host), by_run=by_run) for by_run in (False, True))
    assert sums(second) == pytest.approx(sums(first), rel=1e-9, abs=1e-9)
    return first, second


def sums(timeline: Timeline) -> dict[tuple[str, ...], float]:
    """End time, host waiting time, and seconds of each queue by phase."""
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for place, item in enumerate(one for one in timeline.intervals if isinstance(one.record, Collective)):
        found["collective", str(place)] = item.start
    for item in timeline.intervals:
        key = item.queue, getattr(item.record, "phase", "")
        found["took", *key] += item.end - item.start
        found["alone", *key] += item.cost.seconds
    return {**found, ("end",): timeline.end}


def spans(timeline: Timeline, queue: str = "stream 0") -> list[tuple[float, float]]:
    return [(item.start, item.end) for item in timeline.intervals if item.queue == queue]


def test_consecutive_kernels_are_one_interval():
    first, second = both(kernel(1.0), kernel(2.0), Mark("end layers.0"), kernel(3.0), RecordEvent(1, 0), kernel(4.0))
    assert len(first.intervals) == 4
    assert spans(second) == [(0.0, 6.0), (6.0, 10.0)]


def test_change_of_stream_or_phase_ends_a_run():
    _, second = both(kernel(1.0), kernel(1.0, phase="recompute"), kernel(1.0), kernel(1.0, stream=3), kernel(1.0))
    assert len(second.intervals) == 5


def test_matrix_product_starts_a_new_run():
    product = kernel(1.0, op="aten.mm")
    _, second = both(kernel(1.0), kernel(1.0), product, kernel(1.0))
    assert spans(second) == [(0.0, 2.0), (2.0, 4.0)]
    assert second.intervals[1].record is product


def test_communication_slows_each_kernel_of_a_run_by_its_own_factor():
    # The collective runs from 1 to 5.5: beside the first kernel for 3, the second for 1, the third for half a second.
    kernels = kernel(2.0, beside=1.5), kernel(1.0, beside=1.0), kernel(4.0, beside=2.0)
    gather = [kernel(1.0, stream=1), RecordEvent(1, 1), WaitEvent(2, 1), collective(1, 4.5, stream=2)]
    first, second = both(*gather, *kernels)
    assert len(spans(second)) == 1
    assert spans(second)[0][1] == pytest.approx(spans(first)[-1][1])
    slowed = sum(end - start for start, end in spans(second)) - 7.0
    assert slowed == pytest.approx(1.0 + 0.25)


def test_run_is_split_where_kernels_wait_for_the_host():
    kernels = [kernel(seconds) for seconds in (0.5, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5)]
    first, second = both(*kernels, dispatch_seconds=1.0)
    # Each of the second to the fifth is there when the one before it is done; before the others the device is idle.
    assert spans(first)[-1] == (7.0, 7.5)
    assert spans(second) == [(1.0, 1.5), (2.0, 5.5), (6.0, 6.5), (7.0, 7.5)]


def test_queued_kernels_are_one_run():
    first, second = both(collective(1, 10.0), WaitWork(0, 1), *[kernel(0.5) for _ in range(6)], dispatch_seconds=1.0)
    assert len(spans(first)) == 6
    assert spans(second) == [(11.0, 14.0)]


def test_run_is_interrupted_by_earlier_issued_kernels():
    # The kernel of stream 2 waits for the collective until 2.5, beside the third kernel of the run.
    before = collective(1, 2.5), WaitWork(2, 1), kernel(1.0, stream=2)
    first, second = both(*before, *[kernel(1.0) for _ in range(5)])
    assert spans(first, "stream 2") == spans(second, "stream 2") == [(3.0, 4.0)]
    assert spans(second) == [(0.0, 3.0), (4.0, 6.0)]
    assert [item.cost.seconds for item in second.intervals if item.queue == "stream 0"] == [3.0, 2.0]


def test_run_is_interrupted_by_kernels_that_are_issued_later_and_ready_sooner():
    # As above: that the host has issued the whole run before does not matter, since its kernels are not ready together.
    first, second = both(*[kernel(1.0) for _ in range(5)], collective(1, 2.5), WaitWork(2, 1), kernel(1.0, stream=2))
    assert spans(first, "stream 2") == spans(second, "stream 2") == [(3.0, 4.0)]
    assert spans(second) == [(0.0, 3.0), (4.0, 6.0)]


def test_run_that_begins_while_others_are_ready_gives_way_after_its_first_kernel():
    # While the kernel of stream 3 runs, the run becomes ready, and after it the kernel of stream 2.
    waits = kernel(4.0, stream=3), collective(1, 1.0), WaitWork(0, 1)
    first, second = both(
        *waits, *[kernel(1.0) for _ in range(3)], collective(2, 1.0), WaitWork(2, 2), kernel(1.0, stream=2)
    )
    assert spans(first, "stream 2") == spans(second, "stream 2") == [(5.0, 6.0)]
    assert spans(second) == [(4.0, 5.0), (6.0, 8.0)]


@pytest.mark.parametrize("seed", range(60))
def test_random_traces_have_equal_times_by_run(seed: int):
    chance, records = random.Random(seed), []
    for record in Program(seed).alone():
        records.append(record)
        if isinstance(record, Kernel):
            records += [
                dataclasses.replace(
                    record,
                    flops=chance.randint(1, 2500),
                    attributes={"replayed": True} if chance.random() < 0.3 else {},
                )
                for _ in range(chance.randint(0, 6))
            ]
    host = HOSTS[seed % len(HOSTS)]
    first, second = both(*records, price=price, **{name: getattr(host, name) for name in Host.__slots__})
    assert len(second.intervals) < len(first.intervals)
