"""Nodes of a simulation: operations in progress, and joint operations of several ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, get_args

from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.timing.timeline import COMMUNICATION, Cost, Host, Left, Resource, Timed

NEVER: Final = float("inf")

Lane: TypeAlias = str
LANES: Final[Mapping[Resource, tuple[Lane, ...]]] = {
    name: (f"{name} out", f"{name} in") if name in COMMUNICATION else (name,) for name in get_args(Resource)
}
"""The lanes of each resource, each of which serves one operation at a time: links are full-duplex."""


class Node:
    """An operation in progress, or, without a record, a join of several nodes that takes no time.

    Attributes:
        order: index in the order in which the host of its rank issued it.
        record: of the operation.
        cost: when nothing runs beside it.
        queue: on which it runs.
        lanes: of its resource that it occupies: all but for a send or a receive, which occupies one direction of links.
        meeting: of which it is one side; None where no other simulated rank takes part.
        action: the index of the pipeline action that it belongs to; -1 for none.
        waiting: number of predecessors that are not complete; one of them is the host's dispatch.
        followers: nodes that wait for it.
        done: whether it is complete.
        blocks: whether the host waits for it.
        late: whether the last predecessor that it waited for is a joint operation of ranks.
        start: time at which it began.
        finish: time at which its work ends if nothing changes; infinite until that is known.
        soonest: lower bound of its completion, whatever runs beside it; later than the present when it is issued.
        earliest: lower bound of its end, as the host issues its parts one after another.
        end: the later of `finish` and `earliest`.
        factor: slowdown relative to running alone.
    """

    __slots__ = (
        "action", "blocks", "cost", "done", "earliest", "end", "factor", "finish", "followers", "lanes", "late",
        "meeting", "order", "queue", "record", "soonest", "start", "waiting",
    )  # fmt: skip

    def __init__(self, order: int, record: Timed | ActionOp | None, cost: Cost, queue: str) -> None:
        self.order = order
        self.record = record
        self.cost = cost
        self.queue = queue
        self.lanes = LANES[cost.resource]
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
        """The cost up to now, as if nothing ran beside it."""
        return self.cost

    def slow(self, now: float, host: Host, left: Left | None) -> None:
        """Run a kernel from now on at its speed beside collectives.

        Args:
            now: the present.
            host: that determines the slowdown.
            left: by the collectives; None beside none.
        """
        factor = 1.0 if left is None else host.factor(self.cost, left)
        if factor != self.factor:
            self.finish = now + max(0.0, self.finish - now) / self.factor * factor
            self.end = max(self.finish, self.earliest)
            self.factor = factor


class Participant(Protocol):
    """A rank that takes part in joint operations.

    Attributes:
        number: global rank.
        now: time up to which all events have happened.
    """

    number: int
    now: float

    def meet(self, node: Node, last: Participant) -> None:
        """Begin its side, as the last rank has arrived."""

    def part(self, node: Node, last: Participant) -> None:
        """Complete its side, as the operation has ended on the last rank."""


@dataclass(slots=True, eq=False)
class Meeting:
    """A joint operation of some ranks.

    Attributes:
        need: number of ranks that take part.
        sides: the nodes of the ranks that have arrived, each with its rank.
        finished: number of sides that have ended.
    """

    need: int
    sides: list[tuple[Participant, Node]] = field(default_factory=list)
    finished: int = 0


@functools.cache
def stream_name(number: int) -> str:
    """Return the name of a stream's queue."""
    return f"stream {number}"
