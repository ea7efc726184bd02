"""Chrome trace of an estimate: a process for each rank, a track for each stream and communicator.

The format is that of <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU> (Trace Event
Format), which Perfetto and `chrome://tracing` read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from legoai.cost.estimate import Estimate, RankEstimate
from legoai.cost.report.causes import Causes
from legoai.cost.report.curve import memory_curve
from legoai.cost.timing.intervals import Intervals
from legoai.cost.timing.timeline import Interval, Timed
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel

_MICRO = 1e6


def chrome_trace(estimate: Estimate, causes: Causes) -> str:
    """Return the step as JSON. Times are in microseconds from the beginning of the step."""
    events = [event for item in estimate.ranks for event in _events(item, causes)]
    head = {"plan": estimate.plan, "hash": estimate.digest, "step_time_s": estimate.step_time}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": head}, separators=(",", ":"))


def tracks(item: RankEstimate) -> list[str]:
    """Return the queues of a rank: the stream with most operations first, other streams, then communicators."""
    segments = [segment for _, segment in Intervals.of(item.intervals).segments]
    times = Counter(map(id, segments))
    count: Counter[str] = Counter()
    for segment in {id(segment): segment for segment in segments}.values():
        for queue, operations in Counter(interval.queue for interval in segment.intervals).items():
            count[queue] += operations * times[id(segment)]
    return sorted(count, key=lambda queue: (not queue.startswith("stream"), -count[queue], queue))


def _events(item: RankEstimate, causes: Causes) -> Iterator[dict[str, Any]]:
    stage = f", stage {item.stage}" if item.stage or item.bubble else ""
    yield _named("process_name", item.rank, 0, f"rank {item.rank}{stage}")
    number = {queue: place for place, queue in enumerate(tracks(item))}
    for queue, place in number.items():
        yield _named("thread_name", item.rank, place, queue)
        yield {
            "ph": "M", "name": "thread_sort_index", "pid": item.rank, "tid": place, "args": {"sort_index": place}
        }  # fmt: skip
    lines = Lines(causes)
    for interval in item.intervals:
        record = interval.record
        yield {
            "ph": "X",
            "name": title(record),
            "cat": record.phase,
            "pid": item.rank,
            "tid": number[interval.queue],
            "ts": round(interval.start * _MICRO, 3),
            "dur": round((interval.end - interval.start) * _MICRO, 3),
            "args": {**_arguments(interval), "plan": lines.of(record)},
        }
    for point in memory_curve(item):
        yield {
            "ph": "C",
            "name": "active memory",
            "pid": item.rank,
            "ts": round(point.at * _MICRO, 3),
            "args": dict(point.bytes),
        }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def title(record: Timed) -> str:
    """Return the name of an operation on a track."""
    if isinstance(record, Kernel | HostKernel):
        return record.op
    if isinstance(record, Collective):
        return f"{record.kind} on {record.axis}" if record.axis else record.kind
    return f"copy {record.direction.replace('_', ' ')}"


def _arguments(interval: Interval) -> dict[str, Any]:
    record, cost = interval.record, interval.cost
    known: dict[str, Any] = {"module": record.module, "phase": record.phase, "alone_us": cost.seconds * _MICRO}
    if isinstance(record, Kernel | HostKernel):
        known["shapes"] = [f"{item.dtype}{list(item.shape)}" for item in record.inputs]
        known |= {"flops": record.flops, "bytes": record.bytes_read + record.bytes_written}
    else:
        known["bytes"] = record.bytes
    if isinstance(record, Collective):
        known["ranks"] = len(record.ranks)
    return {**known, "estimated_by": cost.model}


class Lines:
    """Cache of the plan's lines that cause operations."""

    def __init__(self, causes: Causes) -> None:
        self.causes = causes
        self.known: dict[tuple[str | bool, ...], str] = {}

    def of(self, record: Timed) -> str:
        """Return file and line; empty where no statement of the plan causes the operation."""
        if isinstance(record, Collective):
            key: tuple[str | bool, ...] = (
                record.axis, record.kind, record.phase, record.module, record.of_parameters,
            )  # fmt: skip
        else:
            key = ("copy" if isinstance(record, Copy) else record.op, record.module, record.phase)
        if key not in self.known:
            if isinstance(record, Collective):
                cause = self.causes.of_record(record, record.module)
            else:
                op = "copy" if isinstance(record, Copy) else record.op
                cause = self.causes.of_kernel(op, record.module, record.phase)
            self.known[key] = cause.place if cause is not None else ""
        return self.known[key]
