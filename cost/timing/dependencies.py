"""Stream dependencies: the order of each stream and communicator, and the waits of the program.

A stream runs its operations in order; a wait delays its next operation until what it names is complete. As with NCCL, a
collective runs on its communicator's own queue rather than on the calling stream, after everything that the calling
stream waits for. The host continues immediately after all of these.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from legoai.cost.timing.nodes import Node, stream_name
from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.timing.timeline import Cost, Timed
from legoai.cost.trace.records import Collective, RecordEvent, WaitEvent, WaitStream, WaitWork

_INSTANT: Final = Cost(seconds=0.0, resource="compute", model="synchronisation")
_FEW: Final = 4
"""Most nodes that are waited for one by one; more are joined into one node."""


class StreamDependencies(ABC):
    """The queues of one rank, on which nodes are put in program order.

    Attributes:
        order: number of nodes so far.
        last: the latest nodes of each queue: one, or those of a batch.
        waits: what the next operation of a stream must wait for, in addition to the stream's own order.
        events: nodes of events, by number; None where there was nothing to wait for.
        works: the nodes of collectives, by number.
    """

    def __init__(self) -> None:
        self.order = 0
        self.last: dict[str, list[Node]] = {}
        self.waits: defaultdict[str, list[Node]] = defaultdict(list)
        self.events: dict[int, Node | None] = {}
        self.works: dict[int, Node] = {}

    @abstractmethod
    def release(self, node: Node) -> None:
        """Note that one of a node's predecessors is complete."""

    def node(self, record: Timed | ActionOp | None, cost: Cost, queue: str) -> Node:
        """Return a new node."""
        self.order += 1
        return Node(self.order, record, cost, queue)

    def synchronise(self, record: object, number: int) -> None:
        """Update what the next operation of a stream waits for.

        Args:
            record: a wait or an event; other records have no effect.
            number: of the event or the collective.

        Raises:
            ValueError: the record waits for work that was never started.
        """
        if type(record) is WaitEvent:
            # An event that was never recorded is complete, as in CUDA.
            found = self.events.get(number)
            if found is not None:
                self.waits[stream_name(record.stream)].append(found)
        elif type(record) is RecordEvent:
            # The event stands for the stream's latest work, and for everything that the stream still waits for.
            pending = self.pending(stream_name(record.stream))
            self.events[number] = self.join(pending) if pending else None
        elif type(record) is WaitWork:
            if number not in self.works:
                raise ValueError(f"the trace waits for collective {number}, which was never started")
            self.waits[stream_name(record.stream)].append(self.works[number])
        elif type(record) is WaitStream:
            self.waits[stream_name(record.stream)] += self.pending(stream_name(record.other))

    def pending(self, queue: str) -> list[Node]:
        """Return the nodes that must be complete for all work of a queue so far to be complete."""
        return [*self.last.get(queue, ()), *self.waits[queue]]

    def join(self, nodes: Sequence[Node]) -> Node:
        """Return a node that is complete when all of ``nodes`` are complete."""
        if len(nodes) == 1:
            return nodes[0]
        node = self.node(None, _INSTANT, "")
        self.follow(node, nodes)
        self.release(node)
        return node

    @staticmethod
    def follow(node: Node, before: Sequence[Node]) -> None:
        """Make a node wait for those that are not complete."""
        for other in before if len(before) == 1 else dict.fromkeys(before):
            if not other.done:
                other.followers.append(node)
                node.waiting += 1
                node.soonest = max(node.soonest, other.soonest)

    def put(self, node: Node, stream: str, now: float) -> None:
        """Put a node at the end of its queue; the caller makes it the queue's latest.

        Args:
            node: the new node.
            stream: the calling stream. The node's queue is the stream itself, or a communicator's.
            now: time at which it is issued.
        """
        node.soonest = now
        queue, waits = node.queue, self.waits[stream]
        if queue == stream:
            if waits:
                self.follow(node, self.pending(stream))
                waits.clear()
            else:
                self.follow(node, self.last.get(stream, ()))
            return
        if len(waits) > _FEW:
            # The waits of a stream that only starts communication would otherwise grow without bound.
            pending = [item for item in waits if not item.done]
            self.waits[stream] = [self.join(pending)] if pending else []
        self.follow(node, [*self.pending(stream), *self.last.get(queue, ())])


def unfinished(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that are not complete, each once."""
    return list(dict.fromkeys(item for item in nodes if not item.done))


def communicator_name(record: Collective) -> str:
    """Return the name of the queue of a collective's communicator."""
    name = record.communicator or record.axis
    return _communicator(name, () if name else record.ranks)


def pair_name(record: Collective) -> str:
    """Return the name of the queue of the sends and receives between two ranks."""
    return f"between {min(record.ranks)} and {max(record.ranks)}"


@functools.cache
def _communicator(name: str, ranks: tuple[int, ...]) -> str:
    return f"communicator {name or ','.join(map(str, ranks))}"
