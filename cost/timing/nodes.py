"""Nodes of a simulation: operations on their way, and what several ranks do together."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Final, Protocol

from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.timing.timeline import Cost, Host, Left, Timed

NEVER: Final = float("inf")


class Node:
    """An operation on its way through a simulation, or, without a record, a joint of several that takes no time.

    Attributes:
        order: in which the host of its rank issued it.
        record: of the operation.
        cost: when nothing runs beside it.
        queue: on which it runs.
        meeting: what it is one side of; None where no other simulated rank takes part.
        action: the index of the pipeline's action that it belongs to; -1 for none.
        waiting: predecessors that are not complete; one of them is the host's dispatch.
        followers: nodes that wait for it.
        done: whether it is complete.
        blocks: whether the host waits for it.
        late: whether what it waited for last is something that ranks do together.
        start: when it began.
        finish: when its work is over if nothing changes; infinite until that is known.
        soonest: it is not complete before, whatever runs beside it; beyond what has happened when it is issued.
        earliest: it does not end before, as the host puts its parts on the stream one after another.
        end: the later of the two.
        factor: how much slower than alone it runs.
    """

    __slots__ = (
        "action", "blocks", "cost", "done", "earliest", "end", "factor", "finish", "followers", "late", "meeting",
        "order", "queue", "record", "soonest", "start", "waiting",
    )  # fmt: skip

    def __init__(self, order: int, record: Timed | ActionOp | None, cost: Cost, queue: str) -> None:
        self.order = order
        self.record = record
        self.cost = cost
        self.queue = queue
        self.meeting: Meeting | None = None
        self.action = -1
        self.waiting = 1
        self.followers: list[Node] = []
        self.done = self.blocks = self.late = False
        self.start = self.earliest = self.soonest = 0.0
        self.finish = self.end = NEVER
        self.factor = 1.0

    def begin(self, now: float) -> None:
        """Let it run."""
        self.start = now
        self.finish = self.end = now + self.cost.seconds
        self.end = max(self.end, self.earliest)

    def taken(self) -> Cost:
        """What it takes, up to now, when nothing runs beside it."""
        return self.cost

    def slow(self, now: float, host: Host, left: Left | None) -> None:
        """Let it, a kernel, run as fast as beside collectives, from now on.

        Args:
            now: the moment.
            host: that says how much slower.
            left: by the collectives; None beside none.
        """
        factor = 1.0 if left is None else host.factor(self.cost, left)
        if factor != self.factor:
            self.finish = now + max(0.0, self.finish - now) / self.factor * factor
            self.end = max(self.finish, self.earliest)
            self.factor = factor


class Participant(Protocol):
    """A rank that takes part in what ranks do together.

    Attributes:
        number: global rank.
        now: the moment up to which everything has happened.
    """

    number: int
    now: float

    def meet(self, node: Node, last: Participant) -> None:
        """Let its side begin, as the last rank is there."""

    def part(self, node: Node, last: Participant) -> None:
        """Let its side be complete, as it is over on the last rank."""


@dataclass(slots=True, eq=False)
class Meeting:
    """What some ranks do together.

    Attributes:
        need: how many take part.
        sides: the nodes of those that are there, each with its rank.
        finished: how many are over.
    """

    need: int
    sides: list[tuple[Participant, Node]] = field(default_factory=list)
    finished: int = 0


@functools.cache
def stream_name(number: int) -> str:
    """Return the name of a stream's queue."""
    return f"stream {number}"
