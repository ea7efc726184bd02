"""Ranks that are timed together: closed forms of pipelines, and agreement with a rank timed alone."""

from __future__ import annotations

import pytest

from legoai.cost.timing.engine import simulate, simulate_ranks
from legoai.cost.timing.rank_timeline import ActionOp, StandstillError
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.marks import BATCH, END_BATCH
from legoai.cost.trace.records import (
    Collective,
    Copy,
    HostWaitStream,
    Kernel,
    Mark,
    RecordEvent,
    WaitEvent,
    WaitStream,
    WaitWork,
)
from legoai.cost.trace.trace import Trace
from support.simulation import orders

HOST = Host()


def kernel(stream: int = 0, op: str = "k") -> Kernel:
    return Kernel(stream=stream, op=op, inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0, attributes={},
                  module="", phase="forward")  # fmt: skip


def collective(work: int, ranks: tuple[int, ...], kind="all_reduce", stream: int = 0) -> Collective:
    return Collective(work=work, stream=stream, kind=kind, ranks=ranks, axis="", bytes=8, dtype="float32", module="",
                      phase="forward")  # fmt: skip


def unit(record) -> Cost:
    if isinstance(record, Copy):
        return Cost(seconds=0.5, resource="device_to_host", model="test")
    return Cost(seconds=1.0, resource="compute" if isinstance(record, Kernel) else "intra_host", model="test")


def times(records: dict[int, list], price=orders.price) -> tuple[float, dict[int, float]]:
    """Time of all ranks, and the idle seconds of each."""
    found = simulate_ranks(records, price, HOST)
    end = max(item.timeline.end for item in found.values())
    waits = {
        rank: sum(stop - start for start, stop in item.waits) + end - item.actions[-1].end
        for rank, item in found.items()
    }
    return end, waits


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 32), (4, 4)])
@pytest.mark.parametrize("make", [orders.gpipe, orders.one_forward_one_backward])
def test_bubble_of_one_stage_per_rank_is_p_minus_1_over_m(make, ranks: int, micro_batches: int):
    end, waits = times(make(ranks=ranks, micro_batches=micro_batches))
    ideal = 3.0 * micro_batches
    assert end == pytest.approx(ideal + 3.0 * (ranks - 1))
    assert all(wait / ideal == pytest.approx((ranks - 1) / micro_batches) for wait in waits.values())


@pytest.mark.parametrize(("ranks", "stages_of_rank", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (8, 2, 32)])
def test_interleaved_stages_divide_the_bubble(ranks, stages_of_rank, micro_batches):
    records = orders.multi_stage(
        "Interleaved1F1B", ranks=ranks, stages_of_rank=stages_of_rank, micro_batches=micro_batches
    )
    end, waits = times(records)
    ideal = 3.0 * micro_batches * stages_of_rank
    assert end == pytest.approx(ideal + 3.0 * (ranks - 1))
    assert all(wait / ideal == pytest.approx((ranks - 1) / (micro_batches * stages_of_rank)) for wait in waits.values())


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_split_backward_shrinks_the_bubble(name: str):
    size = {"ranks": 4, "stages_of_rank": 2, "micro_batches": 8}
    split, _ = times(orders.multi_stage(name, **size))
    whole, _ = times(orders.multi_stage("Interleaved1F1B", **size))
    assert 3.0 * 8 * 2 <= split < whole


def test_torch_schedules_run_without_deadlock():
    for name in ("LoopedBFS", "DualPipeV"):
        found = simulate_ranks(orders.multi_stage(name, ranks=4, stages_of_rank=2, micro_batches=8), orders.price, HOST)
        assert all(len(item.actions) >= 32 for item in found.values())


MIXED = [
    Mark("step 1"),
    kernel(0), RecordEvent(0, 0), WaitEvent(1, 0), collective(0, (0, 1), stream=1), kernel(0), WaitWork(0, 0),
    kernel(0), WaitStream(2, 0), kernel(2), kernel(0), collective(1, (0, 1)), kernel(0), WaitWork(0, 1),
    Copy(stream=0, direction="device_to_host", bytes=8, blocking=True, module="", phase="other"), HostWaitStream(0),
    kernel(0), RecordEvent(1, 2), WaitEvent(0, 1), kernel(0), Mark("end step 1"),
]  # fmt: skip


@pytest.mark.parametrize("host", [Host(), Host(dispatch_seconds=0.3, compute_slowdown=1.25), Host(dispatch_seconds=2)])
def test_independent_ranks_are_timed_as_alone(host: Host):
    alone = simulate(Trace(rank=0, world=2, stage=0, items=tuple(MIXED)), unit, host)
    together = simulate_ranks({0: MIXED, 2: MIXED}, unit, host)
    for found in together.values():
        assert found.timeline.end == pytest.approx(alone.end)
        assert found.timeline.marks == alone.marks or [t for _, t in found.timeline.marks] == pytest.approx(
            [t for _, t in alone.marks]
        )
        assert sorted((i.start, i.end) for i in found.timeline.intervals) == [
            pytest.approx(pair) for pair in sorted((i.start, i.end) for i in alone.intervals)
        ]


def test_collective_starts_with_the_last_rank():
    early = [collective(0, (0, 1)), WaitWork(0, 0), kernel(0)]
    late = [kernel(0), kernel(0), collective(0, (0, 1)), WaitWork(0, 0), kernel(0)]
    found = simulate_ranks({0: early, 1: late}, unit, HOST)
    assert [item.timeline.end for item in found.values()] == [4.0, 4.0]
    assert found[0].waits == ((0.0, 3.0),)


def exchange(order: str) -> dict[int, list]:
    """Two ranks that send to and receive from each other in one batch, `order` on rank 0: `s` and `r`."""
    sides: dict[int, list] = {}
    for me, kinds in enumerate((order, order.translate(str.maketrans("sr", "rs")))):
        batch = [
            collective(work, (me, 1 - me), "send") if kind == "s" else collective(work, (1 - me, me), "receive")
            for work, kind in enumerate(kinds)
        ]
        waits = [WaitWork(0, work) for work in range(len(order))]
        sides[me] = [Mark(BATCH), *batch, Mark(END_BATCH), *waits, kernel(0)]
    return sides


@pytest.mark.parametrize(("order", "seconds"), [("s", 1), ("sr", 1), ("ss", 2), ("ssr", 2), ("ssrr", 2), ("srsr", 2)])
def test_links_carry_one_transfer_in_each_direction(order: str, seconds: int):
    found = simulate_ranks(exchange(order), unit, HOST)
    assert [item.timeline.end for item in found.values()] == [seconds + 1.0] * 2


def test_send_and_receive_of_different_neighbours_run_side_by_side():
    ring = {
        me: [collective(0, (me, (me + 1) % 3), "send"), collective(1, ((me - 1) % 3, me), "receive"),
             WaitWork(0, 0), WaitWork(0, 1), kernel(0)]
        for me in range(3)
    }  # fmt: skip
    assert [item.timeline.end for item in simulate_ranks(ring, unit, HOST).values()] == [2.0] * 3


def test_collective_shares_its_links_with_no_transfer():
    ranks = {
        me: [collective(0, (0, 1), "send" if me == 0 else "receive"), collective(1, (me, me + 2), stream=1),
             WaitWork(0, 0), WaitWork(0, 1), kernel(0)]
        for me in range(2)
    }  # fmt: skip
    assert [item.timeline.end for item in simulate_ranks(ranks, unit, HOST).values()] == [3.0] * 2


def test_deadlocked_ranks_are_named():
    def one(peer: int, me: int) -> list:
        return [collective(0, (peer, me), "receive"), WaitWork(0, 0), kernel(), collective(1, (me, peer), "send")]

    with pytest.raises(StandstillError, match=r"rank 0 .*receive \(1, 0\).*rank 1"):
        simulate_ranks({0: one(1, 0), 1: one(0, 1)}, unit, HOST)


def test_transfer_to_a_missing_rank_is_refused():
    with pytest.raises(ValueError, match="rank 3 sends or receives"):
        simulate_ranks({0: [collective(0, (0, 3), "send")]}, unit, HOST)


def test_action_takes_the_longer_of_device_and_host_time():
    action = ActionOp(stream=0, seconds=1.0, latency=3.0, host_seconds=2.5)
    found = simulate_ranks({0: [action, action, kernel()]}, unit, HOST)[0]
    assert found.timeline.end == pytest.approx(6.5)  # 2.5 s behind the first begins the second, which takes 3 s
    queued = simulate_ranks({0: [kernel(), kernel(), action, kernel()]}, unit, HOST)[0]
    assert queued.timeline.end == pytest.approx(4.0)
