"""Traces derived for equal ranks equal captured ones, and segments sum up to the records that they represent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from legoai.cost.capture import capture, capture_equal_ranks
from legoai.cost.memory.reserving import reserve
from legoai.cost.memory.storages import memory
from legoai.cost.pipelines.action_classes import Action
from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.equal_stages import equal_coordinates
from legoai.cost.pipelines.patterns import UnequalError
from legoai.cost.timing.actions import ActionTimer
from legoai.cost.timing.breakdown import breakdown, collective_costs
from legoai.cost.timing.engine import simulate_ranks
from legoai.cost.timing.intervals import Intervals, SegmentIntervals
from legoai.cost.timing.timeline import Cost, Host, Interval
from legoai.cost.trace.records import Collective, Kernel, Mark
from legoai.cost.trace.segments import Instance
from legoai.lowering.program import Program
from support.simulation.pipelines import four_ranks
from support.simulation.simulated import in_a_fork
from support.simulation.simulator import in_the_simulator
from support.simulation.timelines import exposed

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
CAPTURED_EACH = {("ZBVZeroBubble", True), ("DualPipeV", True), ("DualPipeV", False)}
"""Where on the first ranks fewer kinds of actions occur than on those behind them; and where the first action of a kind
uses what one of another micro batch left, so that it differs in another order."""


def _compared(program: Program, world: int) -> tuple[int, bool]:
    """Number of traces, and whether the last, derived one equals a full capture of its rank."""
    derived = capture_equal_ranks(program, world=world, pp=4, coordinate=1, others=[2])
    whole = capture(program, world=world, rank=2 * world // 4, replay=False)
    return len(derived), derived[-1] == whole


def check(folder: Path, schedule: str, *, sharded: bool, passes: int = 1) -> None:
    program = four_ranks(folder, schedule, sharded=sharded, passes=passes)
    count, equal = in_the_simulator(_compared, program, 8 if sharded else 4)
    if (schedule, sharded) in CAPTURED_EACH:
        assert count == 1
    else:
        assert (count, equal) == (2, True)


@pytest.mark.slow
def test_a_derived_trace_equals_a_captured_one(tmp_path: Path):
    check(tmp_path, "1F1B", sharded=True)


@pytest.mark.slow
def test_the_trace_of_several_passes_is_derived(tmp_path: Path):
    check(tmp_path, "Interleaved1F1B", sharded=False, passes=3)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_trace_of_graph_stages_is_derived(schedule: str, tmp_path: Path):
    """Also with split backward: values between halves belong to one micro batch, and sums to the stage."""
    program = four_ranks(tmp_path, schedule, sharded=True, traced=True)
    assert equal_coordinates(program, 4) == [[0], [1, 2], [3]]
    assert in_the_simulator(_compared, program, 8) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_of_several_passes_is_derived_under_every_schedule(schedule: str, tmp_path: Path):
    check(tmp_path, schedule, sharded=True, passes=2)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_trace_is_derived_under_every_schedule(schedule: str, sharded: bool, tmp_path: Path):
    check(tmp_path, schedule, sharded=sharded)


def test_ranks_with_equal_stages_are_grouped(tmp_path: Path):
    assert equal_coordinates(four_ranks(tmp_path, "Interleaved1F1B"), 4) == [[0], [1, 2], [3]]
    assert equal_coordinates(four_ranks(tmp_path, "ZBVZeroBubble", layers=16), 4) == [[0], [2, 1, 3]]
    # 13 blocks: of the eight stages the second has one, the third two.
    assert equal_coordinates(four_ranks(tmp_path, "Interleaved1F1B", layers=13), 4) == [[0], [1], [2], [3]]
    # A different first stage leaves the later ranks equal; a different middle stage does not.
    for layer, alike in ((1, [[0], [1, 2], [3]]), (5, [[0], [1], [2], [3]])):
        different = four_ranks(tmp_path, "1F1B", body=f"checkpoint {{ layers.{layer} = full }}\n")
        assert equal_coordinates(different, 4) == alike


def test_ranks_of_a_model_that_cannot_be_built_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = four_ranks(tmp_path, "1F1B")

    def fails(*_: object) -> None:
        raise KeyError("of a factory")

    with monkeypatch.context() as patch:
        patch.setattr("legoai.cost.pipelines.equal_stages.built_unfilled", fails)
        assert equal_coordinates(program, 4) == [[0], [1], [2], [3]]
    monkeypatch.setattr("legoai.cost.pipelines.equal_stages.trainer_of", fails)
    with pytest.raises(KeyError):  # no factory's mistake, but LegoAI's
        equal_coordinates(program, 4)


def _sums(program: Program, world: int) -> list[bool]:
    """For each of two ranks, whether memory and allocator agree between its segments and its records."""
    said = []
    for trace in capture_equal_ranks(program, world=world, pp=4, coordinate=1, others=[2]):
        flat = dataclasses.replace(trace, items=tuple(trace.records), translation=None)
        assert trace.segmented
        assert len(trace.records) == len(flat.records) > 3 * len(trace.items)
        ours, theirs = memory(trace), memory(flat)
        blocks = [
            sorted((item.bytes, item.category, item.module, item.phase) for item in one.live) for one in (ours, theirs)
        ]
        said.append(blocks[0] == blocks[1])
        said.append(dataclasses.replace(ours, live=()) == dataclasses.replace(theirs, live=()))
        said += [
            trace.records[place] == flat.records[place] for place in (ours.peak_record, -1, len(flat.records) // 3)
        ]
        reserved = reserve(flat)
        said.append(reserve(trace) == reserved)
        for share in (0.9, 0.97):
            capacity = int(reserved.peak_reserved * share)
            said.append(reserve(trace, capacity=capacity) == reserve(flat, capacity=capacity))
    return said


@pytest.mark.parametrize(
    "schedule", ["1F1B", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES if name != "1F1B")]
)
def test_memory_of_segments_equals_memory_of_records(schedule: str, tmp_path: Path):
    assert all(in_the_simulator(_sums, four_ranks(tmp_path, schedule), 4))


def _groups(program: Program) -> list[bool]:
    """For each of two ranks, whether its groups are those of its records where each segment is looked at once."""
    said = []
    for trace in capture_equal_ranks(program, world=8, pp=4, coordinate=1, others=[2]):
        each, flat = (
            {item.ranks for item in records if isinstance(item, Collective)}
            for records in (trace.once_each(translated=True), trace.records)
        )
        said.append(each == flat)
    return said


def test_derived_trace_uses_its_own_groups(tmp_path: Path):
    assert in_the_simulator(_groups, four_ranks(tmp_path, "1F1B", sharded=True)) == [True, True]


def kernel(start: float, end: float) -> Interval:
    record = Kernel(stream=0, op="aten.mm", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0,
                    attributes={}, module="layers.0", phase="forward")  # fmt: skip
    return Interval(record, Cost(seconds=end - start, resource="compute", model="test"), "stream 0", start, end)


def gather(start: float, end: float, axis: str = "tp") -> Interval:
    record = Collective(work=0, stream=0, kind="all_gather", ranks=(0, 1), axis=axis, bytes=8, dtype="float32",
                        module="layers.0", phase="forward")  # fmt: skip
    return Interval(record, Cost(seconds=end - start, resource="intra_host", model="test"), axis, start, end)


def bare(intervals: Sequence[Interval]) -> list[float]:
    """Second by second of a tenth: to which collective that began first does a moment belong where nothing computes?"""
    collectives = sorted((i for i in intervals if isinstance(i.record, Collective)), key=lambda i: (i.start, i.end))
    found = [0.0] * len(collectives)
    for tenth in range(round(10 * max(item.end for item in intervals))):
        at = tenth / 10 + 0.05
        if any(item.start <= at < item.end for item in intervals if isinstance(item.record, Kernel)):
            continue
        running = [place for place, item in enumerate(collectives) if item.start <= at < item.end]
        if running:
            found[running[0]] += 0.1
    return found


MIXED = [
    gather(0, 2),
    kernel(1, 3),
    gather(1.5, 4, "pp"),
    kernel(3.5, 3.7),
    gather(3.8, 6),
    gather(7, 8),
    kernel(7.2, 9),
]


def test_exposed_communication_equals_brute_force():
    assert [seconds for _, seconds in exposed(MIXED)] == pytest.approx(bare(MIXED))


def test_segment_intervals_sum_to_their_operations():
    segment = SegmentIntervals(tuple(MIXED))
    held = Intervals([(0.0, segment), (9.0, segment), (8.5, SegmentIntervals((gather(0, 3, "dp"),)))])
    whole = [
        Interval(i.record, i.cost, i.queue, i.start + at, i.end + at) for at, s in held.segments for i in s.intervals
    ]
    assert sorted((i.start, i.end) for i in held) == sorted((i.start, i.end) for i in whole)
    ours, theirs = breakdown(held, 20), breakdown(whole, 20)
    for name in ("compute", "exposed", "copies", "host", "idle", "communication"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
    assert ours.exposed == pytest.approx(sum(bare(whole)))
    costs = collective_costs(held), collective_costs(whole)
    assert [(i.pattern, i.count) for i in costs[0]] == [(i.pattern, i.count) for i in costs[1]]


def _timed(program: Program) -> list[tuple[float, int]]:
    """The seconds of a rank's first stage alone, and its operations, of records and of parts."""
    trace = capture_equal_ranks(program, world=4, pp=4, coordinate=1, others=[])[0]
    items = [item for item in trace.between(trace.steps[-1]) if isinstance(item, Instance | Kernel)]
    timer = ActionTimer(
        cost=lambda _: Cost(seconds=1e-6, resource="compute", model="test"), host=Host(), together=frozenset()
    )
    found = []
    for records in (
        timer.compressed(items),
        [r for i in items for r in (i.records() if isinstance(i, Instance) else (i,))],
    ):
        timeline = simulate_ranks({1: records}, timer.cost, Host())[1].timeline
        found.append((timeline.end, len(timeline.intervals)))
    return found


def test_segments_without_marks_are_timed_as_records(tmp_path: Path):
    ours, theirs = in_the_simulator(_timed, four_ranks(tmp_path, "GPipe"))
    assert ours[0] == pytest.approx(theirs[0])
    assert ours[1] == theirs[1] > 1000


def _ends(program: Program) -> list[str]:
    return [repr(trace.items[-1]) for trace in capture_equal_ranks(program, world=8, pp=4, coordinate=1, others=[2])]


def test_deriving_a_trace_adds_no_allocations_to_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such storages end after the last step, which once let the allocator free what it had never served."""
    write, written = Repeats.replay, []

    def unequal(repeats: Repeats, action: Action, release: Callable[[], object]) -> list[torch.Tensor | None]:
        found = write(repeats, action, release)
        written.extend([action] if repeats.replays else [])
        if len(written) > 4:
            raise UnequalError("stopped")
        return found

    monkeypatch.setattr(Repeats, "replay", unequal)
    program = four_ranks(tmp_path, "Interleaved1F1B", sharded=True)
    assert in_a_fork(_ends, program) == [repr(Mark("end step 2"))]
