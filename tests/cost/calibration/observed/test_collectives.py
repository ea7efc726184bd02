"""Times of collectives in traces of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from legoai.cost.calibration.observed.collectives import CollectiveTimes, StepCollectives, collective_times
from legoai.cost.calibration.observed.trace_files import Call, TraceFile, read_trace
from legoai.cost.network.topology import Placement
from support.simulation.traces import GpuTrace

ADD = ("aten::add", [[64], [64], []], ["float", "float", "Scalar"], 1.0)


def of(traces: Sequence[GpuTrace], folder: Path, per_host: int = 8) -> CollectiveTimes:
    step = StepCollectives()
    for index, one in enumerate(traces):
        step.note(read_trace(one.write(folder / f"{index}.json")))
    return collective_times(step, devices_per_host=per_host)


def test_collective_time_is_that_of_the_last_rank(tmp_path: Path) -> None:
    ranks = [GpuTrace(rank) for rank in range(2)]
    for trace, lasts in zip(ranks, ([30.0, 80.0, 31.0], [90.0, 33.0, 32.0]), strict=True):
        trace.call(*ADD)
        trace.collective("_allgather_base", (1024, 2048), lasts[0], dtype="BFloat16")
        trace.collective("_reduce_scatter_base", (2048, 1024), lasts[1])
        trace.collective("_allgather_base", (1024, 2048), lasts[2], dtype="BFloat16")
    found = of(ranks, tmp_path)
    here = Placement(2, 1, 2)
    assert not found.waited
    assert set(found.seconds) == {("all_gather", here, 4096), ("reduce_scatter", here, 8192)}
    assert found.seconds["all_gather", here, 4096] == pytest.approx([30e-6, 31e-6], abs=1e-8)
    assert found.seconds["reduce_scatter", here, 8192] == pytest.approx([33e-6], abs=1e-8)


def test_groups_of_a_mesh_are_measured_by_placement(tmp_path: Path) -> None:
    groups = [("0", range(4)), ("1", (0, 1)), ("2", (2, 3)), ("3", (0, 2)), ("4", (1, 3))]
    ranks = [GpuTrace(rank, 4, groups) for rank in range(4)]
    for rank, trace in enumerate(ranks):
        own = [group for group in groups[1:] if rank in group[1]]
        trace.call(*ADD)
        for group in own if rank % 2 else reversed(own):  # in another order between two groups
            trace.collective("allreduce", (1024, 1024), 10.0 + rank + 100 * int(group[0]), group=group)
    found = of(ranks, tmp_path, per_host=2)
    inside, across = (found.seconds["all_reduce", on, 4096] for on in (Placement(2, 1, 2), Placement(2, 2, 1)))
    assert sorted(inside) == pytest.approx([110e-6, 212e-6], abs=1e-8)
    assert sorted(across) == pytest.approx([310e-6, 411e-6], abs=1e-8)
    assert not found.waited


def test_trace_of_one_rank_gives_waiting_times_only(tmp_path: Path) -> None:
    trace = GpuTrace(1)
    trace.call(*ADD)
    trace.collective("broadcast", (1024, 1024), 10.0)
    found = of([trace], tmp_path)
    assert not found.seconds and set(found.waited) == {("broadcast", Placement(2, 1, 2), 4096)}


def test_ranks_of_a_large_group_come_from_name_or_stride(tmp_path: Path) -> None:
    group = ("7", range(0, 64, 2))
    trace = GpuTrace(0, 64, [("7", group[1])])
    trace.call(*ADD)
    trace.collective("allreduce", (1024, 1024), 10.0, group=group, ranks="[0, 2, 4, ...]")
    assert set(of([trace], tmp_path).waited) == {("all_reduce", Placement(32, 8, 4), 4096)}
    trace.groups = []
    assert of([trace], tmp_path).unknown == {"ranks of the group not in the trace": 1}
    for event in trace.events:
        if event["cat"] == "kernel" and "Collective name" in event["args"]:
            event["args"] |= {"Global rank start": 0, "Global rank stride": 2}
    assert set(of([trace], tmp_path).waited) == {("all_reduce", Placement(32, 8, 4), 4096)}


def test_unknown_collectives_are_skipped_and_listed(tmp_path: Path) -> None:
    trace = GpuTrace(0, 4)
    trace.call(*ADD)
    trace.collective("recv", (1024, 1024), 10.0)
    trace.collective("allgather_into_tensor_coalesced", (1024, 2048), 10.0)
    trace.collective("allreduce", (1024, 1024), 10.0, dtype="Odd")
    trace.collective("allreduce", (1024, 1024), 10.0, group=("1", (0,)))
    trace.collective("send", (1024, 1024), 10.0, group=("0", (0, 1, 2, 3)))
    found = of([trace], tmp_path)
    assert not found.seconds and not found.waited
    assert set(found.unknown) == {
        "recv",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "send in a group of more than two",
    }


def test_ranks_with_different_orders_are_skipped(tmp_path: Path) -> None:
    ranks = [GpuTrace(rank) for rank in range(2)]
    for trace, sizes in zip(ranks, ((1024, 2048), (2048, 2048)), strict=True):
        trace.call(*ADD)
        for size in sizes:
            trace.collective("allreduce", (size, size), 10.0)
    found = of(ranks, tmp_path)
    assert found.unknown == {"in another order on another rank": 2}
    assert [bytes for _, _, bytes in found.seconds] == [8192]


def test_uneven_all_to_all_counts_as_an_even_one_of_its_busiest_rank(tmp_path: Path) -> None:
    """A mixture's experts receive different numbers of tokens."""
    ranks = [GpuTrace(rank) for rank in range(2)]
    for trace, counts in zip(ranks, ((1024, 512), (1024, 1536)), strict=True):
        trace.call(*ADD)
        trace.collective("all_to_allv", counts, 10.0)
    found = of(ranks, tmp_path)
    assert not found.unknown and not found.waited
    assert set(found.seconds) == {("all_to_all", Placement(2, 1, 2), 4 * 1536)}


def test_sends_of_two_ranks_are_two_transfers(tmp_path: Path) -> None:
    """Stages of a pipeline send activations one way and gradients the other, in one group."""
    ranks = [GpuTrace(rank) for rank in range(2)]
    for trace, size, lasts in zip(ranks, (1024, 2048), (10.0, 20.0), strict=True):
        trace.call(*ADD)
        trace.collective("allreduce", (512, 512), 10.0)
        trace.collective("send", (size, size), lasts)
    found, here = of(ranks, tmp_path), Placement(2, 1, 2)
    assert not found.unknown and set(found.seconds) == {("all_reduce", here, 2048)}
    assert found.waited == {
        ("send", here, 4 * size): [pytest.approx(lasts * 1e-6, abs=1e-8)]
        for size, lasts in ((1024, 10.0), (2048, 20.0))
    }


@pytest.mark.parametrize("lasts", [0.0, -5.0, float("nan")])
def test_collective_without_a_duration_is_skipped(lasts: float, tmp_path: Path) -> None:
    ranks = [GpuTrace(rank) for rank in range(2)]
    for trace in ranks:
        trace.call(*ADD)
        trace.collective("allreduce", (1024, 1024), 10.0)
        trace.collective("allreduce", (1024, 1024), lasts if trace.rank else 12.0)
    found = of(ranks, tmp_path)
    seen = [seconds for times in (*found.seconds.values(), *found.waited.values()) for seconds in times]
    assert min(seen) == pytest.approx(10e-6, abs=1e-8)


def of_gloo(groups: Sequence[tuple[str, tuple[int, ...]]], per_host: int) -> CollectiveTimes:
    """An all-gather of two ranks and an all-reduce, each taken up by one of gloo's threads."""
    floats = ["float", "float", "", "Scalar", "Scalar"]
    step = StepCollectives()
    for rank, lasts in ((0, 100.0), (1, 60.0)):
        calls = [
            Call("c10d::_allgather_base_", (1, 1), 0.0, 10.0, 1, ([[2048], [1024], [], [], []], floats, None, None)),
            Call("c10d::allreduce_", (1, 1), 200.0, 210.0, 2, ([[[512]], [], []], ["TensorList", "", ""], None, None)),
            Call("gloo:all_gather", (1, 2), 5.0, 5.0 + lasts, 3, ([[1024]], ["float"], None, None)),
            Call("gloo:all_reduce", (1, 2), 205.0, 205.0 + lasts, 4, ([[512]], ["float"], None, None)),
        ]
        step.note(TraceFile(path=Path(), rank=rank, world=4, groups=tuple(groups), calls=calls))
    return collective_times(step, devices_per_host=per_host)


def test_gloo_group_is_identified_by_ranks_or_gathered_shapes() -> None:
    one = of_gloo([("0", (0, 1))], 4)
    here = Placement(2, 1, 2)
    assert one.seconds == {
        ("all_gather", here, 8192): [pytest.approx(60e-6)], ("all_reduce", here, 2048): [pytest.approx(60e-6)],
    }  # fmt: skip
    mesh = [("0", (0, 1, 2, 3)), ("1", (0, 1)), ("2", (0, 2)), ("3", (1, 3))]
    two = of_gloo(mesh, 4)
    assert not two.seconds and two.waited == {("all_gather", here, 8192): pytest.approx([100e-6, 60e-6])}
    assert two.unknown == {"of a group that the trace does not name": 2}, "the all-reduces"
    assert of_gloo(mesh, 2).unknown == {"of a group that the trace does not name": 4}, "inside a host, or between two"
