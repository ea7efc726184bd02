"""Effects of the patches of pipelines; each test fails without the patches that name it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules

from legoai.cost.capture import capture, capture_equal_ranks
from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.stages import PipelineHooks, hooked_schedules
from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import Collective, Mark, WaitWork
from legoai.cost.trace.trace import Trace
from legoai.lowering.program import Program
from support.simulation.pipelines import four_ranks, two_ranks
from support.simulation.simulated import in_a_fork

MICRO_BATCHES = 4


def traced(text: str) -> Trace:
    return capture(text, world=4, rank=2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The second rank of two, under a schedule whose neighbouring stages are on different ranks, sharded as well."""
    text = two_ranks(
        tmp_path_factory.mktemp("plans"), "InterleavedZeroBubble", sharded=True, micro_batches=MICRO_BATCHES
    )
    return in_a_fork(traced, text)


def test_every_action_and_transfer_is_recorded(trace: Trace):
    last = trace.steps[-1]
    records = list(trace.records[last.start : last.stop])
    names = [record.name for record in records if isinstance(record, Mark)]
    begun = [name.removeprefix(ACTION) for name in names if name.startswith(ACTION)]
    assert sorted(begun) == sorted(name.removeprefix(END_ACTION) for name in names if name.startswith(END_ACTION))
    kinds = Counter(name.lstrip("0123456789").rstrip("0123456789") for name in begun)
    # Two stages of this rank; the loss is in the last one's forward, and gradients are reduced once for each stage.
    assert (kinds["F"], kinds["I"], kinds["W"]) == (2 * MICRO_BATCHES,) * 3
    assert (kinds["UNSHARD"], kinds["RESHARD"], kinds["REDUCE_GRAD"]) == (2, 2, 2)
    assert names.count(BATCH) == names.count(END_BATCH)
    transfers = [record for record in records if isinstance(record, Collective) and record.kind in ("send", "receive")]
    # Of each micro batch: two activations come and one goes, two gradients go and one comes.
    assert Counter(item.kind for item in transfers) == {"receive": 3 * MICRO_BATCHES, "send": 3 * MICRO_BATCHES}
    waited = {record.work for record in records if isinstance(record, WaitWork)}
    assert {item.work for item in transfers if item.kind == "receive"} <= waited


def test_transfers_of_one_operation_are_recorded_as_a_batch(tmp_path: Path):
    # In 1F1B each rank receives what comes for the next action with the send of what the last one made.
    trace = in_a_fork(traced, two_ranks(tmp_path, "1F1B", sharded=True, micro_batches=MICRO_BATCHES))
    last = trace.steps[-1]
    records = list(trace.records[last.start : last.stop])
    names = [record.name for record in records if isinstance(record, Mark)]
    assert names.count(BATCH) == names.count(END_BATCH) == MICRO_BATCHES - 1
    begin = records.index(Mark(BATCH))
    together = records[begin : records.index(Mark(END_BATCH))]
    assert {item.kind for item in together if isinstance(item, Collective)} == {"send", "receive"}


LATE_FORWARD = (
    "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1",
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
)
"""An order in which the second activation is sent and received after a backward."""
LATE_BACKWARD = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
    "1RECV_F0,1F0,1RECV_F1,1B0,1F1,1SEND_B0,1B1,1SEND_B1",
)
"""One in which the first gradient is sent after a forward."""


@pytest.mark.parametrize(
    ("order", "rank"),
    [
        (LATE_FORWARD, 0),
        pytest.param(LATE_FORWARD, 1, marks=pytest.mark.slow),
        (LATE_BACKWARD, 1),
    ],
)
def test_transfers_have_the_phase_of_the_action_that_they_serve(tmp_path: Path, order: tuple[str, ...], rank: int):
    (tmp_path / "late.csv").write_text("\n".join(order))
    program = two_ranks(tmp_path, 'csv("late.csv")', micro_batches=2)
    trace = in_a_fork(partial(capture, world=2, rank=rank), program.text)
    last = trace.steps[-1]
    found = Counter(
        (item.kind, item.phase)
        for item in trace.records[last.start : last.stop]
        if isinstance(item, Collective) and item.kind in ("send", "receive")
    )
    forward, backward = ("send", "receive") if rank == 0 else ("receive", "send")
    assert found == {(forward, "forward"): 2, (backward, "backward"): 2}


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that go through modes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def transferred() -> tuple[list[str], list[str]]:
    """Operators of two sends, and their records."""
    recorder = Capture()
    with simulated_device(recorder, rank=0, world=2, kind="cuda") as fake:
        recorder.mesh = init_device_mesh(SIM, (2,), mesh_dim_names=("pp",))
        with fake, hooked_schedules(PipelineHooks(recorder, Repeats(recorder, 0))), Dispatch(recorder):
            operations = [dist.P2POp(dist.isend, torch.empty(4, device=SIM), 1) for _ in range(2)]
            with Called() as called:
                schedules._wait_batch_p2p(schedules._batch_p2p(operations))
    return called.names, [item.kind for item in recorder.records if isinstance(item, Collective)]


def test_one_way_transfers_are_not_recorded_as_operators():
    assert in_a_fork(transferred) == ([], ["send", "send"])


def derived(program: Program) -> tuple[int, bool]:
    """Number of ranks that one capture represents, and whether the last derived trace equals a capture."""
    found = capture_equal_ranks(program, world=8, pp=4, coordinate=1, others=[2])
    return len(found), found[-1] == capture(program, world=8, rank=4, replay=False)


@pytest.mark.slow
def test_one_rank_represents_an_equal_rank(tmp_path: Path):
    program = four_ranks(tmp_path, "Interleaved1F1B", sharded=True)
    assert in_a_fork(derived, program) == (2, True)
