"""Stream dependencies: the order of each queue, and the waits of the program.

A stream runs its operations in order; waits hold its next operation back until what they name is complete. A collective
runs on its communicator's own queue and not on the stream that asked for it, as NCCL's do, behind what that stream
waits for. The host goes on at once after all of these.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from legoai.cost.trace.records import Collective, RecordEvent, WaitEvent, WaitStream, WaitWork


class Waiting(Protocol):
    """An operation on its way through a simulation.

    Attributes:
        done: whether it is complete.
        waiting: predecessors that are not complete.
        followers: operations that wait for it.
    """

    done: bool
    waiting: int
    followers: list[Self]


N = TypeVar("N", bound=Waiting)


class Queues(ABC, Generic[N]):
    """The queues of one rank, on which operations are put in the order of its program."""

    def __init__(self) -> None:
        self.last: dict[str, list[N]] = {}
        """The latest of each queue: one, or those of a batch."""
        self.waits: defaultdict[str, list[N]] = defaultdict(list)
        """What the next operation of a stream must wait for, beyond the stream's own order."""
        self.events: dict[int, N | None] = {}
        self.works: dict[int, N] = {}

    @abstractmethod
    def joint(self) -> N:
        """Return a new node that takes no time, with the host's dispatch to wait for."""

    @abstractmethod
    def dispatched(self, node: N) -> None:
        """Take note that the host has issued a node that takes no time."""

    def synchronise(self, record: object) -> None:
        """Note what the next operation of a stream waits for.

        Raises:
            ValueError: the record waits for work that was never started.
        """
        if isinstance(record, WaitStream):
            self.waits[stream_name(record.stream)] += self.pending(stream_name(record.other))
        elif isinstance(record, RecordEvent):
            # The event stands for the stream's latest work and all that the stream still waits for.
            pending = self.pending(stream_name(record.stream))
            self.events[record.event] = self.join(pending) if pending else None
        elif isinstance(record, WaitEvent):
            # An event that was never recorded is complete, as in CUDA.
            found = self.events.get(record.event)
            if found is not None:
                self.waits[stream_name(record.stream)].append(found)
        elif isinstance(record, WaitWork):
            if record.work not in self.works:
                raise ValueError(f"the trace waits for collective {record.work}, which was never started")
            self.waits[stream_name(record.stream)].append(self.works[record.work])

    def pending(self, queue: str) -> list[N]:
        """Return what must be complete for all work of a queue so far to be complete."""
        return [*self.last.get(queue, ()), *self.waits[queue]]

    def join(self, nodes: Sequence[N]) -> N:
        """Return a node that is complete when all of ``nodes`` are."""
        if len(nodes) == 1:
            return nodes[0]
        node = self.joint()
        self.follow(node, nodes)
        self.dispatched(node)
        return node

    @staticmethod
    def follow(node: N, before: Sequence[N]) -> None:
        """Let a node wait for those that are not complete."""
        for other in before if len(before) == 1 else {id(item): item for item in before}.values():
            if not other.done:
                other.followers.append(node)
                node.waiting += 1

    def put(self, node: N, stream: str, queue: str) -> None:
        """Put a node at the end of a queue; it is the caller's to make it the queue's latest.

        Args:
            node: new.
            stream: that asks for it.
            queue: where it runs: the stream itself, or a communicator's.
        """
        if queue == stream:
            self.follow(node, self.pending(stream))
            self.waits[stream].clear()
            return
        if len(self.waits[stream]) > _FEW:
            # A stream on which only communication is called keeps what it waits for, which would grow without end.
            pending = [item for item in self.waits[stream] if not item.done]
            self.waits[stream] = [self.join(pending)] if pending else []
        self.follow(node, [*self.pending(stream), *self.last.get(queue, ())])


_FEW = 4
"""Nodes that are waited for one by one; more are joined."""


def unfinished(nodes: Iterable[N]) -> list[N]:
    """Return those that are not complete, each once."""
    return list({id(item): item for item in nodes if not item.done}.values())


@functools.cache
def stream_name(number: int) -> str:
    """Return the name of a stream's queue."""
    return f"stream {number}"


def communicator_name(record: Collective) -> str:
    """Return the name of the queue of a collective's communicator."""
    return _communicator(record.axis, () if record.axis else record.ranks)


@functools.cache
def _communicator(axis: str, ranks: tuple[int, ...]) -> str:
    return f"communicator {axis or ','.join(map(str, ranks))}"
