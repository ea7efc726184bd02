"""The timeline agrees with closed forms on constructed cases, and with a brute-force longest path."""

import dataclasses
import itertools
import random

import pytest

from legoai.cost.timing.engine import simulate
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.records import (
    Collective,
    Copy,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    RecordEvent,
    WaitEvent,
    WaitStream,
    WaitWork,
)
from legoai.cost.trace.trace import Trace
from support.simulation.timelines import busy, exposed

WHERE = {"module": "", "phase": "forward"}


def kernel(seconds, stream=0):
    return Kernel(
        stream=stream, op="aten.mm", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0,
        attributes={"seconds": seconds}, **WHERE,
    )  # fmt: skip


def collective(work, seconds, stream=0, axis="dp_shard"):
    return Collective(
        work=work,
        stream=stream,
        kind="all_gather",
        ranks=(0, 1),
        axis=axis,
        bytes=round(seconds * 1e6),
        dtype="uint8",
        **WHERE,
    )


def copy(seconds, blocking, direction="host_to_device", stream=0):
    return Copy(stream=stream, direction=direction, bytes=round(seconds * 1e6), blocking=blocking, **WHERE)


def cost(record):
    if isinstance(record, Kernel):
        return Cost(seconds=record.attributes["seconds"], resource="compute", model="given")
    resource = record.direction if isinstance(record, Copy) else "intra_host"
    return Cost(seconds=record.bytes / 1e6, resource=resource, model="given")


def run(*records, **host):
    return simulate(Trace(rank=0, world=2, stage=0, items=records), cost, Host(**host))


def test_a_stream_runs_in_order():
    timeline = run(kernel(1.0), kernel(2.0))
    assert [(item.start, item.end) for item in timeline.intervals] == [(0.0, 1.0), (1.0, 3.0)]


def test_perfect_overlap_takes_as_long_as_the_longer():
    timeline = run(collective(1, 2.0), kernel(2.0), WaitWork(0, 1), kernel(1.0))
    assert timeline.end == 3.0
    assert [seconds for _, seconds in exposed(timeline.intervals)] == [0.0]


def test_without_overlap_times_add_up():
    timeline = run(collective(1, 2.0), WaitWork(0, 1), kernel(3.0))
    assert timeline.end == 5.0
    assert [seconds for _, seconds in exposed(timeline.intervals)] == [2.0]


def test_partial_overlap_exposes_the_rest():
    timeline = run(collective(1, 2.0), kernel(0.5), WaitWork(0, 1), kernel(1.0))
    assert timeline.end == 3.0
    assert [seconds for _, seconds in exposed(timeline.intervals)] == [1.5]


def test_prefetching_layers_hides_all_gathers_but_the_first():
    layers, gather, compute = 8, 1.0, 3.0
    records = [collective(0, gather, stream=1)]
    for layer in range(layers):
        if layer + 1 < layers:
            records.append(collective(layer + 1, gather, stream=1))
        records += [WaitWork(0, layer), kernel(compute)]
    timeline = run(*records)
    assert timeline.end == pytest.approx(gather + layers * compute)
    assert sum(seconds for _, seconds in exposed(timeline.intervals)) == pytest.approx(gather)


def test_events_order_streams():
    timeline = run(kernel(1.0), RecordEvent(7, 0), kernel(4.0), WaitEvent(1, 7), copy(2.0, blocking=False, stream=1))
    assert timeline.end == 5.0
    # The event was recorded after the first kernel: stream 1 goes on then.
    timeline = run(kernel(1.0), RecordEvent(7, 0), WaitEvent(1, 7), kernel(2.0, stream=1))
    assert timeline.intervals[-1].start == 1.0


def test_an_event_that_was_never_recorded_is_complete():
    assert run(WaitEvent(0, 3), kernel(1.0)).end == 1.0


def test_recorded_event_includes_waits_of_its_stream():
    timeline = run(kernel(2.0, stream=1), WaitStream(0, 1), RecordEvent(1, 0), WaitEvent(2, 1), kernel(1.0, stream=2))
    assert timeline.end == 3.0


def test_wait_stream_takes_only_earlier_work():
    timeline = run(kernel(1.0, stream=1), WaitStream(0, 1), collective(5, 9.0, stream=1), kernel(1.0))
    assert max(item.end for item in timeline.intervals if isinstance(item.record, Kernel)) == 2.0


def test_collectives_are_serialised_within_and_across_communicators():
    same = run(collective(1, 1.0), collective(2, 1.0))
    other = run(collective(1, 1.0), collective(2, 1.0, axis="tp"))
    assert same.end == other.end == 2.0


@pytest.mark.parametrize(
    ("wait", "host_time"), [(HostWaitDevice(), 5.0), (HostWaitStream(0), 1.0), (HostWaitEvent(9), 1.0)]
)
def test_host_waits_for_the_named_work(wait, host_time):
    timeline = run(kernel(1.0), RecordEvent(9, 0), collective(1, 4.0), wait, Mark("after"))
    assert dict(timeline.marks)["after"] == host_time


def test_blocking_copy_blocks_the_host():
    timeline = run(kernel(2.0), copy(1.0, blocking=True, direction="device_to_host"), Mark("after"), kernel(1.0))
    assert dict(timeline.marks)["after"] == 3.0
    assert timeline.end == 4.0


def test_host_dispatch_bounds_small_kernels():
    timeline = run(*[kernel(1e-6) for _ in range(100)], dispatch_seconds=1e-5)
    assert timeline.end == pytest.approx(100 * 1e-5 + 1e-6)
    timeline = run(*[kernel(1e-4) for _ in range(100)], dispatch_seconds=1e-5)
    assert timeline.end == pytest.approx(1e-5 + 100 * 1e-4)


def test_operators_issued_by_python_cost_more_host_time():
    by_code = [kernel(1e-6) for _ in range(100)]
    by_python = [dataclasses.replace(item, issuer="python") for item in by_code]
    by_function = [dataclasses.replace(item, issuer="function") for item in by_python]
    replayed = [dataclasses.replace(item, attributes={**item.attributes, "replayed": True}) for item in by_python]
    seconds = [
        run(*records, dispatch_seconds=1e-5, python_seconds=3e-5).end
        for records in (by_code, by_python, by_function, replayed)
    ]
    assert seconds == pytest.approx([100 * 1e-5 + 1e-6, 100 * 3e-5 + 1e-6, 100 * 3e-5 + 1e-6, 1e-4])
    assert run(*by_python, dispatch_seconds=1e-5).end == seconds[0]
    times = {"dispatch_seconds": 1e-5, "python_seconds": 3e-5, "function_seconds": 5e-5}
    functions = [run(*records, **times).end for records in (by_code, by_python, by_function, replayed)]
    assert functions == pytest.approx([*seconds[:2], 100 * 5e-5 + 1e-6, seconds[3]])


def test_recomputed_operators_include_the_hooks_of_checkpoints():
    times = {"dispatch_seconds": 1e-5, "python_seconds": 3e-5, "function_seconds": 5e-5}
    again = dataclasses.replace(kernel(1e-6), phase="recompute", issuer="python")
    found = [Host(**times, recompute_seconds=seconds).dispatch(again) for seconds in (None, 7e-5)]
    assert found == [3e-5, 7e-5]
    in_a_graph = dataclasses.replace(again, issuer="node")
    assert Host(**times, recompute_seconds=7e-5).dispatch(in_a_graph) == 1e-5


@pytest.mark.parametrize("record", [collective(1, 1e-6), copy(1e-6, blocking=False, direction="host_to_device")])
def test_collectives_and_copies_have_the_host_time_of_kernels(record):
    host = Host(dispatch_seconds=1e-5, python_seconds=3e-5)
    assert host.dispatch(record) == 1e-5
    assert host.dispatch(dataclasses.replace(record, issuer="python")) == 3e-5


def test_overlapping_communication_slows_computation():
    timeline = run(collective(1, 1.0), kernel(2.0), compute_slowdown=1.25)
    # One second at 1/1.25 of the speed does 0.8 of the kernel; the other 1.2 run alone.
    assert timeline.end == pytest.approx(1.0 + 1.2)


def test_waiting_for_unknown_work_is_an_error():
    with pytest.raises(ValueError, match="never started"):
        run(WaitWork(0, 4))


def test_busy_merges_overlapping_intervals():
    timeline = run(kernel(1.0), collective(1, 3.0), kernel(1.0))
    assert busy(timeline.intervals, ("compute",)) == [(0.0, 2.0)]


def longest_path(records):
    """Completion times where resources are not shared: a brute-force evaluation of the waits."""
    end, last, waits, events, works = {}, {}, {}, {}, {}
    for index, record in enumerate(records):
        if isinstance(record, Kernel | Collective):
            stream = record.stream
            queue = f"c{record.axis}" if isinstance(record, Collective) else stream
            start = max([last.get(stream, 0.0), last.get(queue, 0.0), *waits.get(stream, [])])
            end[index] = start + cost(record).seconds
            last[queue] = end[index]
            if isinstance(record, Collective):
                works[record.work] = end[index]
            else:
                waits[stream] = []
        elif isinstance(record, RecordEvent):
            events[record.event] = max([last.get(record.stream, 0.0), *waits.get(record.stream, [])])
        elif isinstance(record, WaitEvent):
            waits.setdefault(record.stream, []).append(events.get(record.event, 0.0))
        elif isinstance(record, WaitStream):
            waits.setdefault(record.stream, []).append(max([last.get(record.other, 0.0), *waits.get(record.other, [])]))
        elif isinstance(record, WaitWork):
            waits.setdefault(record.stream, []).append(works[record.work])
    return max(end.values(), default=0.0)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_equal_the_longest_path(seed):
    # One compute stream and one communicator: nothing shares a resource, so waits alone decide.
    random_ = random.Random(seed)
    records, work, events = [], itertools.count(1), itertools.count(1)
    started, recorded = [], []
    for _ in range(60):
        kind = random_.choice(["kernel", "collective", "record", "event", "stream", "work"])
        if kind == "kernel":
            records.append(kernel(random_.randint(1, 9) / 8))
        elif kind == "collective":
            started.append(next(work))
            records.append(collective(started[-1], random_.randint(1, 9) / 8, stream=random_.choice([0, 1])))
        elif kind == "record":
            recorded.append(next(events))
            records.append(RecordEvent(recorded[-1], random_.choice([0, 1])))
        elif kind == "event" and recorded:
            records.append(WaitEvent(random_.choice([0, 1]), random_.choice(recorded)))
        elif kind == "stream":
            records.append(WaitStream(*random_.sample([0, 1], 2)))
        elif kind == "work" and started:
            records.append(WaitWork(random_.choice([0, 1]), random_.choice(started)))
    assert run(*records).end == pytest.approx(longest_path(records))
