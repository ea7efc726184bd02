"""Extrapolated spans, where the host or the device is the bottleneck."""

from __future__ import annotations

from typing import Any

import pytest

from legoai.cost.timing.engine import simulate
from legoai.cost.timing.pace import Pace, Paced, keeps_pace
from legoai.cost.timing.repeats import Span
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.records import Copy, HostWaitDevice, Kernel, Mark
from legoai.cost.trace.trace import Trace


def paced(start: float, *, took: float, by_host: float, more: int = 10, lag: float = 0.0) -> Paced:
    return Paced(Span(start, start + took, more), by_host, lag)


def test_device_bound_span_is_extrapolated():
    assert keeps_pace([paced(0, took=2, by_host=1), paced(20, took=2, by_host=1)], [])


def test_host_bound_span_is_extrapolated():
    assert keeps_pace([paced(0, took=2, by_host=2), paced(20, took=3, by_host=3)], [])


def test_device_backlog_is_extrapolated_while_it_lasts():
    assert keeps_pace([paced(0, took=2, by_host=2.5, lag=5)], [])
    assert not keeps_pace([paced(0, took=2, by_host=2.5, lag=4.9)], [])
    assert not keeps_pace([paced(0, took=2, by_host=2.5)], [])


def test_backlog_grows_with_the_spans_before():
    forward, backward = paced(0, took=2, by_host=1), paced(20, took=2, by_host=3, lag=1)
    assert keeps_pace([forward, backward], [])
    assert not keeps_pace([paced(0, took=2, by_host=1.5), backward], [])


def test_backlog_before_a_host_bound_span_prevents_extrapolation():
    assert not keeps_pace([paced(0, took=2, by_host=1), paced(20, took=2, by_host=2)], [])
    assert keeps_pace([paced(0, took=2, by_host=2), paced(20, took=2, by_host=1)], [])


def test_device_bound_micro_batches_are_extrapolated():
    blocks = [paced(0, took=2, by_host=1)]
    assert keeps_pace(blocks, [paced(0, took=20, by_host=29)])
    assert not keeps_pace(blocks, [paced(0, took=20, by_host=31)])


def kernel() -> Kernel:
    return Kernel(
        stream=0, op="aten.add", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0, attributes={},
        module="", phase="forward",
    )  # fmt: skip


READ = Copy(stream=0, direction="device_to_host", bytes=8, blocking=True, module="", phase="other")


@pytest.mark.parametrize(
    ("before", "behind", "lag"),
    [
        ([], [], 3.0),
        ([], [HostWaitDevice()], 3.0),
        ([], [READ], 3.0),
        ([HostWaitDevice()], [HostWaitDevice()], 0.0),
    ],
    ids=["nowhere", "for the device behind them", "for a copy behind them", "before them"],
)
def test_lag_is_measured_up_to_the_next_host_wait(before: list[Any], behind: list[Any], lag: float):
    """Kernels take the device 2 s and the host 1 s."""

    def cost(record: object) -> Cost:
        return Cost(seconds=2.0, resource="device_to_host" if isinstance(record, Copy) else "compute", model="test")

    host = Host(dispatch_seconds=1.0)
    items = [Mark(name="begin"), *([kernel(), *before] if before else []), *(kernel() for _ in range(7)), *behind]
    items.append(Mark(name="end"))
    timeline = simulate(Trace(rank=0, world=1, stage=0, items=items), cost, host)
    starts = {id(interval.record): interval.start for interval in timeline.intervals}
    pace = Pace(items, [starts.get(id(item)) for item in items], dict(timeline.marks), 0.0, cost=cost, host=host)
    first = next(place for place, item in enumerate(items) if isinstance(item, Kernel)) + len(before) + bool(before)
    found = pace.settled(range(first + 2, first + 7), 1)
    assert found is not None
    assert found.lag == lag
    assert (found.took, found.by_host) == (2.0, 1.0)
