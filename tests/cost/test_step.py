"""A pipeline's step: the costs of its actions agree with every operation of every rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from legoai.api import estimate
from legoai.cost import step as pipeline
from legoai.cost.step import PipelineStep, simulate_pipeline
from legoai.cost.timing.actions import ActionTimer
from legoai.cost.timing.breakdown import breakdown
from legoai.cost.timing.engine import simulate_ranks
from legoai.cost.timing.intervals import since
from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.records import Collective, Copy, HostWaitStream, Kernel, Mark, WaitWork
from legoai.cost.trace.trace import records_of
from legoai.lowering.program import Program
from support.simulation import orders
from support.simulation.pipelines import four_ranks, two_ranks
from support.simulation.simulated import in_a_fork

HOSTS = (
    Host(),
    Host(dispatch_seconds=1e-6, compute_slowdown=1.1),
    Host(dispatch_seconds=8e-6),
    Host(dispatch_seconds=8e-6, python_seconds=4e-5),
)


def price(record) -> Cost:
    """A device of 10^12 operations and bytes per second, and a network of 5 x 10^10 bytes per second."""
    if isinstance(record, Collective):
        return Cost(seconds=1e-6 + record.bytes / 5e10, resource="intra_host", model="test")
    if isinstance(record, Copy):
        return Cost(seconds=record.bytes / 1e10, resource="host_to_device", model="test")
    moved = record.bytes_read + record.bytes_written
    return Cost(seconds=2e-6 + (record.flops + moved) / 1e12, resource="compute", model="test")


def _both(program: Program, world: int) -> list[list[tuple[float, list[float], list[int]]]]:
    """For each host the seconds, the bubbles and the numbers of operations, of every operation and of actions."""
    found = []
    taken = pipeline._captured(pipeline._Job(program, world, 2, 0, "cuda", None), lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_captured", lambda *_: taken)
        for host in HOSTS:
            steps = [_timed(program, world, host, whole=whole) for whole in (True, False)]
            found.append(
                [
                    (step.seconds, [item.bubble for item in step.ranks],
                     [len(item.times.timeline.intervals) for item in step.ranks])
                    for step in steps
                ]
            )  # fmt: skip
    return found


def _timed(program: Program, world: int, host: Host, *, whole: bool) -> PipelineStep:
    """A step with every action timed as one op, or whole."""
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(ActionTimer, "compressed", lambda _, items, translation: list(records_of(items, translation)))
        return simulate_pipeline(program, world=world, pp=2, kind="cuda", cost=price, host=host)


def test_underived_ranks_of_a_group_are_regrouped() -> None:
    groups = [[1, 2, 3, 4, 5, 6], [0], [7, 8, 9]]
    assert list(pipeline._left(groups, {0, 1, 2, 3, 7})) == [[4, 5, 6], [8], [9]]
    assert list(pipeline._left(groups, set(range(10)))) == []


@pytest.mark.parametrize(
    ("schedule", "sharded"),
    [
        ("1F1B", False),
        *(
            pytest.param(schedule, sharded, marks=pytest.mark.slow)
            for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
            for sharded in (False, True)
            if (schedule, sharded) != ("1F1B", False)
        ),
    ],
)
def test_compressed_actions_equal_full_timing(schedule: str, sharded: bool, tmp_path: Path):
    program = two_ranks(tmp_path, schedule, sharded=sharded)
    for whole, actions in in_a_fork(_both, program, 4 if sharded else 2):
        assert actions[0] == pytest.approx(whole[0], rel=0.01)
        # Where the host is behind, waits inside of an action are less sharply separated from bubbles.
        assert actions[1] == pytest.approx(whole[1], abs=0.015)
        assert actions[2] == whole[2]


def _names(program: Program) -> list[tuple[set[str], set[tuple[int, ...]], float]]:
    """Stages and blocks of each rank's operations, the ranks of its transfers, and its end time."""
    step = simulate_pipeline(program, world=4, pp=4, kind="cuda", cost=price, host=Host())
    found = []
    for item in step.ranks:
        held = since(item.times.timeline.intervals, 0.0, item.trace.translation)
        blocks = {".".join(one.record.module.split(".")[:2]) for one in held if "layers." in one.record.module}
        sent = {one.record.ranks for one in held if isinstance(one.record, Collective) and one.record.kind == "send"}
        found.append((blocks | {one.name[0] for one in item.times.actions}, sent, step.seconds))
    return found


@pytest.mark.slow
def test_derived_ranks_name_their_own_blocks_stages_and_neighbours(tmp_path: Path):
    """Ranks 1 and 2 are equal, and the trace of one is derived from the other."""
    found = in_a_fork(_names, four_ranks(tmp_path, "GPipe", layers=6))
    ends = [{(0, 1)}, {(1, 0), (1, 2)}, {(2, 1), (2, 3)}, {(3, 2)}]
    assert [sent for _, sent, _ in found] == ends
    blocks = [{name for name in names if "layers." in name} for names, *_ in found]
    assert len(set.union(*blocks)) == sum(map(len, blocks)) == 6
    assert [names - held for (names, *_), held in zip(found, blocks, strict=True)] == [{"0"}, {"1"}, {"2"}, {"3"}]


def transfers_take_time(record) -> Cost:
    cost = orders.price(record)
    return dataclasses.replace(cost, seconds=0.25) if isinstance(record, Collective) else cost


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8)])
def test_bubble_is_the_idle_time_without_transfers(ranks: int, micro_batches: int):
    records = orders.one_forward_one_backward(ranks=ranks, micro_batches=micro_batches)
    found = simulate_ranks(records, transfers_take_time, Host())
    seconds = max(item.timeline.end for item in found.values())
    for item in found.values():
        parts = breakdown(item.timeline.intervals, seconds)
        assert parts.exposed > 0
        assert pipeline._bubble(item, seconds) * seconds == pytest.approx(parts.idle)


PLAN = """\
plan tiny

model     llama3("tiny")
cluster   h100_sxm(devices = 2)
batch     (global = 16, micro = 2, seq_len = 128)
mesh      (pp = 2)
pipeline on pp (schedule = 1F1B)
precision (param = fp32)
optimizer adamw(lr = 1e-2)
clip      (norm = 1.0)
require   bubble <= 0.9
"""


def _estimated(file: Path) -> dict:
    found = estimate(file)
    return {
        "step": found.step_time,
        "bubble": found.bubble_fraction,
        "idle": [item.breakdown.idle / found.step_time for item in found.ranks],
        "ranks": [(item.rank, item.stage, item.bubble) for item in found.ranks],
        "peaks": [item.memory.peak for item in found.ranks],
        "ends": [max(i.end for i in item.intervals) for item in found.ranks],
        "requirements": [item.ok for item in found.requirements],
    }


def test_estimate_covers_every_pipeline_rank(tmp_path: Path):
    file = tmp_path / "tiny.plan"
    file.write_text(PLAN)
    found = in_a_fork(_estimated, file)
    assert [(rank, stage) for rank, stage, _ in found["ranks"]] == [(0, 0), (1, 1)]
    assert found["bubble"] == pytest.approx(sum(bubble for *_, bubble in found["ranks"]) / 2)
    assert 0 < found["bubble"] < 0.9
    assert all(bubble <= idle + 1e-9 for (*_, bubble), idle in zip(found["ranks"], found["idle"], strict=True))
    assert found["requirements"] == [True]
    assert found["step"] >= max(found["ends"]) > 0.5 * found["step"]
    assert min(found["peaks"]) > 0


def kernel() -> Kernel:
    return Kernel(stream=0, op="k", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0, attributes={},
                  module="", phase="forward")  # fmt: skip


def collective(work: int, ranks: tuple[int, ...]) -> Collective:
    return Collective(work=work, stream=0, kind="all_reduce", ranks=ranks, axis="", bytes=0, dtype="float32",
                      module="", phase="forward")  # fmt: skip


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param([kernel(), collective(1, (0, 1)), WaitWork(0, 1)], id="what ranks do together"),
        pytest.param([kernel(), HostWaitStream(0)], id="what the host waits for"),
        pytest.param([kernel(), WaitWork(0, 7), kernel()], id="what an earlier action left running"),
    ],
)
def test_action_shared_with_other_ranks_is_not_compressed(inside: list):
    timer = ActionTimer(cost=price, host=Host(), together=frozenset({0, 1}))
    records = [Mark("action 0F0"), *inside, Mark("end action 0F0")]
    assert timer.compressed(records) == records


def test_equal_actions_are_timed_once():
    timer = ActionTimer(cost=price, host=Host(), together=frozenset({0, 1}))
    work = [kernel(), kernel()]
    first = [Mark("action 0F0"), *work, Mark("end action 0F0")]
    found = timer.compressed([*first, Mark("action 0F1"), *work, Mark("end action 0F1")])
    assert [type(item) for item in found] == [Mark, ActionOp, Mark, Mark, ActionOp, Mark]
    assert len(timer.known) == 1
    assert found[1].seconds == pytest.approx(4e-6)


def test_host_ahead_of_an_action_adds_no_time():
    host = Host(dispatch_seconds=8e-6, python_seconds=4e-5)
    timer = ActionTimer(cost=price, host=host, together=frozenset({0, 1}))
    one = dataclasses.replace(kernel(), issuer="python")
    [_, action, _] = timer.compressed([Mark("action 0F0"), one, one, Mark("end action 0F0")])
    assert action.seconds == pytest.approx(4e-6)
    assert action.host_seconds == pytest.approx(8e-5)
    assert action.latency == pytest.approx(8e-5 + 2e-6)
