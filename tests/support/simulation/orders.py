"""Pipeline traces without a model: each action is one kernel of a given time."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.pipelining import schedules

from legoai.cost.timing.timeline import Cost
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import Collective, Kernel, Mark, Record, WaitWork

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def price(record) -> Cost:
    """Kernels take the seconds of their action, and transfers none."""
    if isinstance(record, Kernel):
        return Cost(seconds=SECONDS[record.op], resource="compute", model="test")
    return Cost(seconds=0.0, resource="inter_host", model="test")


class Rank:
    """Collects the records of one rank."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[Record] = [Mark("step 2")]
        self.works = 0

    def transfer(self, kind: str, peer: int) -> int:
        ranks = (self.number, peer) if kind == "send" else (peer, self.number)
        self.works += 1
        self.records.append(
            Collective(work=self.works, stream=0, kind=kind, ranks=ranks, axis="pp", bytes=1, dtype="", module="",
                       phase="forward")
        )  # fmt: skip
        return self.works

    def wait(self, *works: int) -> None:
        self.records += [WaitWork(0, work) for work in works]

    def compute(self, name: str, kind: str) -> None:
        kernel = Kernel(stream=0, op=kind, inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0,
                        attributes={}, module="", phase="forward")  # fmt: skip
        self.records += [Mark(f"{ACTION}{name}"), kernel, Mark(f"{END_ACTION}{name}")]


def multi_stage(name: str, *, ranks: int, stages_of_rank: int, micro_batches: int) -> dict[int, list[Record]]:
    """The records of a schedule that is torch's list of actions, with the sends that torch adds."""
    found = {}
    for rank in range(ranks):
        held = stages_of(name, rank, ranks=ranks, stages_of_rank=stages_of_rank)
        schedule = getattr(schedules, f"Schedule{name}")(held, n_microbatches=micro_batches, loss_fn=lambda *_: None)
        here, received = Rank(rank), {}
        owner = schedule.stage_index_to_group_rank
        for action in schedule.pipeline_order_with_comms[rank]:
            for part in action.sub_actions or (action,):
                _take(here, part, received, owner)
        found[rank] = [*here.records, Mark("end step 2")]
    return found


def stages_of(name: str, rank: int, *, ranks: int, stages_of_rank: int) -> list:
    """Stages of one rank with the attributes that torch's schedules read to list actions."""
    total = ranks * stages_of_rank
    return [
        SimpleNamespace(
            num_stages=total, group_size=ranks, group_rank=rank, stage_index=index, is_first=index == 0,
            is_last=index == total - 1, submod=None,
        )
        for index in _held(name, rank, ranks, total)
    ]  # fmt: skip


def _held(name: str, rank: int, ranks: int, total: int) -> list[int]:
    return [rank, total - 1 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else list(range(rank, total, ranks))


def _take(here: Rank, action, received: dict, owner) -> None:
    kind, stage, micro_batch = action.computation_type.value, action.stage_index, action.microbatch_index
    forward = kind.endswith("F")
    neighbour = stage + (1 if (kind == "SEND_F") or (kind == "RECV_B") else -1)
    if kind.startswith("SEND"):
        here.transfer("send", owner[neighbour])
    elif kind.startswith("RECV"):
        received[stage, forward, micro_batch] = here.transfer("receive", owner[neighbour])
    elif kind in SECONDS:
        if kind != "W" and (stage, forward, micro_batch) in received:
            here.wait(received.pop((stage, forward, micro_batch)))
        here.compute(f"{stage}{kind}{micro_batch}", kind)


def gpipe(*, ranks: int, micro_batches: int) -> dict[int, list[Record]]:
    """As `ScheduleGPipe._step_microbatches` does it."""
    found = {}
    for rank in range(ranks):
        here = Rank(rank)
        for kind, before, after in (("F", rank - 1, rank + 1), ("B", rank + 1, rank - 1)):
            for micro_batch in range(micro_batches):
                if 0 <= before < ranks:
                    here.wait(here.transfer("receive", before))
                here.compute(f"{rank}{kind}{micro_batch}", kind)
                if 0 <= after < ranks:
                    here.transfer("send", after)
        found[rank] = [*here.records, Mark("end step 2")]
    return found


def one_forward_one_backward(*, ranks: int, micro_batches: int) -> dict[int, list[Record]]:
    """As `Schedule1F1B._step_microbatches` does it, with its batches of sends and receives."""
    found = {}
    for rank in range(ranks):
        here = Rank(rank)
        before, after = rank > 0, rank < ranks - 1
        warm_up = min(micro_batches, ranks - rank)

        def together(*transfers: tuple[bool, str, int], here: Rank = here) -> None:
            issued = [(kind, peer) for there, kind, peer in transfers if there]
            marked = len({kind for kind, _ in issued}) > 1
            here.records += [Mark(BATCH)] * marked
            works = [here.transfer(kind, peer) for kind, peer in issued]
            here.records += [Mark(END_BATCH)] * marked
            here.wait(*works)

        forwards = backwards = 0
        for index in range(warm_up):
            together((before, "receive", rank - 1))
            here.compute(f"{rank}F{forwards}", "F")
            forwards += 1
            if index < warm_up - 1 and after:
                here.transfer("send", rank + 1)
        while True:
            together((after, "send", rank + 1), (after, "receive", rank + 1))
            here.compute(f"{rank}B{backwards}", "B")
            backwards += 1
            if forwards == micro_batches:
                break
            together((before, "send", rank - 1), (before, "receive", rank - 1))
            here.compute(f"{rank}F{forwards}", "F")
            forwards += 1
        if before:
            here.transfer("send", rank - 1)
        while backwards < micro_batches:
            together((after, "receive", rank + 1))
            here.compute(f"{rank}B{backwards}", "B")
            backwards += 1
            if before:
                here.transfer("send", rank - 1)
        found[rank] = [*here.records, Mark("end step 2")]
    return found
