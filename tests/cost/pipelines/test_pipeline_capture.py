"""Captured pipeline stages execute torch's schedules, whatever actions the capture skips."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules

from legoai.cost import capture as capturing
from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import Collective, Kernel, Mark, WaitWork
from legoai.cost.trace.segments import Instance
from legoai.cost.trace.trace import Trace
from legoai.lowering.program import Program
from support.simulation.orders import stages_of
from support.simulation.pipelines import MICRO_BATCHES, two_ranks
from support.simulation.simulator import in_the_simulator

EVERY = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
NOT_SLOW = ("1F1B",)
SCHEDULES = [pytest.param(name, marks=() if name in NOT_SLOW else pytest.mark.slow) for name in EVERY]


def _taken(program: Program, world: int, replay: bool) -> list[Trace]:
    return [capture(program, world=world, rank=place * world // 2, replay=replay) for place in range(2)]


def taken(program: Program, *, world: int = 2, replay: bool = True) -> list[Trace]:
    return in_the_simulator(_taken, program, world, replay)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Both ranks under a schedule, with nothing left out."""
    folder = tmp_path_factory.mktemp("plans")
    return functools.cache(lambda schedule: taken(two_ranks(folder, schedule), replay=False))


def second_step(trace: Trace) -> list:
    last = trace.steps[-1]
    return list(trace.records[last.start : last.stop])


def actions(trace: Trace) -> list[str]:
    found = [record.name for record in second_step(trace) if isinstance(record, Mark)]
    return [name.removeprefix(ACTION) for name in found if name.startswith(ACTION)]


def expected(schedule: str, rank: int) -> list[str]:
    """The actions that compute, as torch lists them; those of 1F1B, which torch lists wrongly, as it is defined."""
    if schedule == "1F1B":
        warm_up, left = 2 - rank, MICRO_BATCHES
        order = [f"{rank}F{index}" for index in range(warm_up)]
        for index in range(left):
            order.append(f"{rank}B{index}")
            order += [f"{rank}F{index + warm_up}"] * (index + warm_up < left)
        return order
    held = stages_of(schedule, rank, ranks=2, stages_of_rank=1 if schedule == "GPipe" else 2)
    made = getattr(schedules, f"Schedule{schedule}")(
        held[0] if schedule == "GPipe" else held, n_microbatches=MICRO_BATCHES, loss_fn=lambda *_: None
    )
    listed = [action for action in made.pipeline_order[rank] if action is not None]
    parts = [part for action in listed for part in (action.sub_actions or (action,))]
    return [str(part) for part in parts if re.search(r"\d[FBIW]\d", str(part))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_actions_equal_the_torch_schedule(schedule: str, traces):
    for rank, trace in enumerate(traces(schedule)):
        compute_actions = [name for name in actions(trace) if re.fullmatch(r"\d+[FBIW]\d+", name)]
        assert compute_actions == expected(schedule, rank)
        assert trace.stage == rank


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sends_and_receives_match_in_order(schedule: str, traces):
    first, second = (
        [record for record in second_step(trace) if isinstance(record, Collective)] for trace in traces(schedule)
    )
    for ends in ((0, 1), (1, 0)):
        sender, receiver = (first, second) if ends == (0, 1) else (second, first)
        sent = [item.bytes for item in sender if item.kind == "send" and item.ranks == ends]
        received = [item.bytes for item in receiver if item.kind == "receive" and item.ranks == ends]
        assert sent == received
        assert sent


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_compute_every_module_once(schedule: str, traces):
    forward, backward = Counter(), Counter()
    for trace in traces(schedule):
        for record in second_step(trace):
            if isinstance(record, Kernel) and record.flops:
                (forward if record.phase == "forward" else backward)[record.module] += record.flops
    layers = {name: flops for name, flops in forward.items() if name.startswith("layers.")}
    by_place = {}
    for name, flops in layers.items():
        by_place.setdefault(name.split(".", 2)[2], set()).add(flops)
    assert all(len(found) == 1 for found in by_place.values()), "every block does the same"
    linear = [name for name in layers if name.endswith(("wq", "wo", "w1", "w2"))]
    assert linear
    assert all(backward[name] == 2 * forward[name] for name in linear)


def test_1f1b_holds_p_minus_rank_micro_batches(traces):
    """p - rank, whatever the number of micro batches; GPipe keeps them all."""
    for rank, trace in enumerate(traces("1F1B")):
        kept = most = 0
        for name in actions(trace):
            kept += 1 if "F" in name else -1 if re.fullmatch(r"\d+B\d+", name) else 0
            most = max(most, kept)
        assert most == 2 - rank


@pytest.mark.slow
def test_activations_grow_with_micro_batches_for_gpipe_only(tmp_path: Path):
    found = {}
    for schedule in ("GPipe", "1F1B"):
        for count in (6, 8, 10):
            trace = taken(two_ranks(tmp_path, schedule, micro_batches=count))[0]
            report = memory(trace)
            found[schedule, count] = sum(
                live.bytes
                for live in report.live
                if live.category == "activation" and live.module.startswith("layers.")
            )
    grown = found["GPipe", 8] - found["GPipe", 6]
    assert grown > 0
    assert found["GPipe", 10] - found["GPipe", 8] == grown
    assert found["1F1B", 6] == found["1F1B", 8] == found["1F1B", 10]
    # Both peaks are in the second backward, when gradients are there: GPipe keeps 7 micro batches then, 1F1B 2.
    assert found["1F1B", 8] == found["GPipe", 8] - 5 * (grown // 2)


def test_waits_match_started_transfers_and_batches_close(traces):
    for trace in traces("1F1B"):
        begun, open_batch, open_action = set(), False, None
        for record in trace.records:
            if isinstance(record, Collective):
                begun.add(record.work)
            elif isinstance(record, WaitWork):
                assert record.work in begun
            elif isinstance(record, Mark):
                if record.name in (BATCH, END_BATCH):
                    assert open_batch == (record.name == END_BATCH)
                    open_batch = not open_batch
                elif record.name.startswith(ACTION):
                    assert open_action is None
                    open_action = record.name.removeprefix(ACTION)
                elif record.name.startswith(END_ACTION):
                    assert open_action == record.name.removeprefix(END_ACTION)
                    open_action = None
        assert not open_batch
        assert open_action is None


def _shortened(program: Program, world: int) -> list[Trace | None]:
    return [
        capturing._shortened(program, world=world, rank=place * world // 2, kind="cuda", containers=())
        for place in range(2)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replayed_actions_equal_executed_actions(schedule: str, traces, tmp_path: Path):
    shortened = in_the_simulator(_shortened, two_ranks(tmp_path, schedule), 2)
    for whole, short in zip(traces(schedule), shortened, strict=True):
        assert short is not None, "left out"
        assert short.records == whole.records


@pytest.mark.slow
@pytest.mark.parametrize("schedule", EVERY)
def test_replayed_actions_of_sharded_stages_equal_executed_actions(schedule: str, tmp_path: Path):
    program = two_ranks(tmp_path, schedule, sharded=True)
    for whole, short in zip(taken(program, world=4, replay=False), taken(program, world=4), strict=True):
        assert short.records == whole.records
        reduced = [item for item in second_step(short) if isinstance(item, Collective)]
        assert Counter(item.kind for item in reduced if item.axis == "dp_shard")["reduce_scatter"] > 0


def _few_actions(program: Program) -> list[Trace]:
    found = []
    for rank in (0, 2):
        taken = capturing._few_actions(program, world=4, rank=rank, kind="cuda", gpu=None, ways=(None,))
        assert taken is not None, "the first way is the right one"
        assert len({id(item.segment) for item in taken[0].recorder.records if isinstance(item, Instance)}) > 1
        found.append(replace(taken[1], items=taken[0].finished()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [item for item in SCHEDULES if item.values[0] not in SPLITS_BACKWARD])
def test_replayed_actions_with_reshard_after_forward_equal_executed_actions(schedule: str, tmp_path: Path):
    program = two_ranks(tmp_path, schedule, sharded=True, micro_batches=12, reshard="after_forward")
    for whole, short in zip(
        taken(program, world=4, replay=False), in_the_simulator(_few_actions, program), strict=True
    ):
        assert short.records == whole.records


def test_stages_of_an_order_file_are_captured(tmp_path: Path):
    (tmp_path / "order.csv").write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    program = two_ranks(tmp_path, 'csv("order.csv")', micro_batches=3)
    first, second = taken(program)
    assert [name for name in actions(first) if len(name) == 3] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert [name for name in actions(second) if len(name) == 3] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
