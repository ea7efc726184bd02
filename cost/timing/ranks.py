"""Simulation of several ranks that wait for each other.

Each rank has its streams, its host and its resources as in :mod:`legoai.cost.timing.timeline`, whose rules hold here
too. What ranks do together, sends and receives and the collectives whose group holds more than one of them, begins when
the last of them is there and is over for all when it is over for the last. Until then it keeps its queue, and no
resource.

Sends and receives between two ranks run in the order in which they are issued, as NCCL keeps a queue for each pair; a
batch of them is one operation of the group's own queue (`torch.distributed.batch_isend_irecv`).

One clock drives all ranks. A host runs ahead until it waits for its device, so that only completions, and operations
that wait for a slow host, are events.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.timing.dependencies import Queues, communicator_name, stream_name, unfinished
from legoai.cost.timing.intervals import Intervals, SegmentIntervals
from legoai.cost.timing.rank_timeline import ActionOp, ActionTime, RankTimeline, StandstillError
from legoai.cost.timing.timeline import Cost, Host, Interval, Resource, Timed, Timeline
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import (
    Collective,
    Copy,
    HostKernel,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    Record,
)

_INSTANT: Final = Cost(seconds=0.0, resource="compute", model="synchronisation")
_NETWORK: Final = ("intra_host", "inter_host")
_POINT_TO_POINT: Final = ("send", "receive")


def simulate_ranks(
    ranks: Mapping[int, Sequence[Record | ActionOp]], cost: Callable[[Timed], Cost], host: Host
) -> dict[int, RankTimeline]:
    """Run the records of several ranks together.

    Args:
        ranks: the records of each, by global rank.
        cost: of an operation when nothing runs beside it.
        host: of every rank.

    Raises:
        StandstillError: the ranks wait for each other.
        ValueError: a rank waits for work that it never started, or sends to one that is not there.
    """
    return _Ranks(ranks, cost, host).run()


@dataclass(slots=True, eq=False)
class _Meeting:
    """What some ranks do together."""

    need: int
    sides: list[_Node] = field(default_factory=list)
    finished: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    """An operation on its way through the simulation."""

    rank: _Rank
    order: int
    record: Timed | ActionOp | None
    cost: Cost
    queue: str
    meeting: _Meeting | None = None
    action: int = -1
    waiting: int = 1
    """Predecessors that are not complete; one of them is the host's dispatch."""
    followers: list[_Node] = field(default_factory=list)
    cause: _Node | None = None
    """What it waited for last; None is the host."""
    blocks: bool = False
    """Whether the host waits for it."""
    done: bool = False
    start: float = 0.0
    since: float = 0.0
    remaining: float = 0.0
    earliest: float = 0.0
    """It does not end before, as the host puts its parts on the stream one after another."""
    version: int = 0


class _Ranks:
    def __init__(
        self, ranks: Mapping[int, Sequence[Record | ActionOp]], cost: Callable[[Timed], Cost], host: Host
    ) -> None:
        self.cost, self.host = cost, host
        self.now = 0.0
        self.count = 0
        self.heap: list[tuple[float, int, _Node, int]] = []
        """(when, tie, node, version): the node ends, or, of version -1, the host has issued it."""
        self.meetings: dict[tuple[object, ...], _Meeting] = {}
        self.ranks = {rank: _Rank(self, rank, records) for rank, records in ranks.items()}

    def run(self) -> dict[int, RankTimeline]:
        for rank in self.ranks.values():
            rank.go_on()
        while self.heap:
            when, _, node, version = heapq.heappop(self.heap)
            if version == -1:
                self.now = max(self.now, when)
                node.rank.release(node, None)
            elif version == node.version and not node.done:
                self.now = max(self.now, when)
                node.rank.end(node)
        stuck = [rank.stuck() for rank in self.ranks.values() if not rank.complete]
        if stuck:
            raise StandstillError("the ranks of the pipeline wait for each other: " + "; ".join(stuck))
        return {number: rank.result() for number, rank in self.ranks.items()}

    def push(self, when: float, node: _Node, version: int) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, node, version))

    def meeting(self, record: Collective, place: int) -> _Meeting | None:
        """What the record is one side of; None where no other simulated rank takes part.

        Args:
            record: of one rank.
            place: how many like it the rank has issued before.
        """
        if record.kind in _POINT_TO_POINT:
            missing = [rank for rank in record.ranks if rank not in self.ranks]
            if missing:
                raise ValueError(f"rank {missing[0]} sends or receives, and is not simulated")
            need, key = 2, ("between", record.ranks, place)
        else:
            need = sum(rank in self.ranks for rank in record.ranks)
            key = (record.kind, record.ranks, place)
        if need < 2:
            return None
        return self.meetings.setdefault(key, _Meeting(need))


class _Rank(Queues[_Node]):
    """One rank: its host, its streams, its resources."""

    def __init__(self, all_ranks: _Ranks, number: int, records: Sequence[Record | ActionOp]) -> None:
        super().__init__()
        self.all, self.number, self.records = all_ranks, number, records
        self.place = 0
        self.host_time = 0.0
        self.blocked = 0.0
        self.waited_for = 0
        self.order = 0
        self.issued: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self.batch: list[_Node] | None = None
        self.ready: defaultdict[Resource, list[tuple[int, _Node]]] = defaultdict(list)
        self.running: dict[Resource, _Node] = {}
        self.active = 0
        self.idle_since = 0.0
        self.idle: list[tuple[float, float]] = []
        self.intervals: list[Interval] = []
        self.segments: list[tuple[float, SegmentIntervals]] = []
        self.marks: list[tuple[str, float]] = []
        self.action = -1
        self.actions: list[tuple[str, float, float]] = []

    @property
    def complete(self) -> bool:
        return self.place == len(self.records) and not self.waited_for and self.pending_nodes == 0

    @property
    def pending_nodes(self) -> int:
        return sum(not node.done for nodes in self.last.values() for node in nodes)

    def stuck(self) -> str:
        """What the rank waits for, in words."""
        alone = [
            side
            for meeting in self.all.meetings.values()
            if len(meeting.sides) < meeting.need
            for side in meeting.sides
            if side.rank is self
        ]
        names = {f"{node.record.kind} {node.record.ranks}" for node in alone if isinstance(node.record, Collective)}
        where = self.actions[-1][0] if self.actions else "its first action"
        return f"rank {self.number} after {where} for {', '.join(sorted(names)) or 'its own streams'}"

    def result(self) -> RankTimeline:
        intervals = Intervals([(0.0, SegmentIntervals(tuple(self.intervals), named=True)), *self.segments])
        return RankTimeline(
            timeline=Timeline(
                intervals=intervals,
                marks=tuple(self.marks),
                end=max(intervals.end, self.host_time),
                host_blocked=self.blocked,
            ),
            actions=tuple(ActionTime(*item) for item in self.actions if item[2] >= 0),
            waits=tuple(self.idle),
        )

    def go_on(self) -> None:
        """Let the host issue operations until it waits for one."""
        records, host = self.records, self.all.host
        while self.place < len(records):
            record = records[self.place]
            self.place += 1
            if isinstance(record, Kernel | Collective | Copy):
                self.host_time += host.dispatch(record)
                node = self._put(record, self.all.cost(record))
                if isinstance(record, Copy) and record.blocking and self._block([node]):
                    return
            elif isinstance(record, Mark):
                self._mark(record.name)
            elif isinstance(record, ActionOp):
                begun = self.host_time
                node = self._put(record, Cost(seconds=record.seconds, resource="compute", model="action"), begun)
                self.works.update(dict.fromkeys(record.works, node))
                self.events.update(dict.fromkeys(record.events, node))
                self.host_time = begun + record.host_seconds
            elif isinstance(record, HostKernel):
                cost = self.all.cost(record)
                self.intervals.append(Interval(record, cost, "host", self.host_time, self.host_time + cost.seconds))
                self.host_time += cost.seconds
            elif isinstance(record, HostWaitDevice):
                if self._block([node for nodes in self.last.values() for node in nodes]):
                    return
            elif isinstance(record, HostWaitStream):
                if self._block(self.pending(stream_name(record.stream))):
                    return
            elif isinstance(record, HostWaitEvent):
                found = self.events.get(record.event)
                if self._block([found] if found is not None else []):
                    return
            else:
                self.synchronise(record)

    def _mark(self, name: str) -> None:
        self.marks.append((name, self.host_time))
        if name.startswith(ACTION):
            self.actions.append((name.removeprefix(ACTION), -1.0, -1.0))
            self.action = len(self.actions) - 1
        elif name.startswith(END_ACTION):
            self.action = -1
        elif name == BATCH:
            self.batch = []
        elif name == END_BATCH:
            assert self.batch is not None
            for node in self.batch:
                self.last[node.queue] = self.batch
            self.batch = None

    def joint(self) -> _Node:
        """Return a node that takes no time."""
        return _Node(self, self._next(), None, _INSTANT, "")

    def dispatched(self, node: _Node) -> None:
        """Take note that the host has issued a node."""
        self.release(node, None)

    def _next(self) -> int:
        self.order += 1
        return self.order

    def _put(self, record: Kernel | Collective | Copy | ActionOp, cost: Cost, at: float | None = None) -> _Node:
        stream = stream_name(record.stream)
        queue, meeting = stream, None
        if isinstance(record, Collective):
            queue = self._queue(record)
            issued = ("between", record.ranks) if record.kind in _POINT_TO_POINT else (record.kind, record.ranks)
            meeting = self.all.meeting(record, self.issued[issued])
            self.issued[issued] += 1
        node = _Node(self, self._next(), record, cost, queue, meeting, self.action)
        node.remaining = cost.seconds
        if isinstance(record, ActionOp):
            node.earliest = self.host_time + record.latency
        self.put(node, stream, queue)
        if self.batch is not None and isinstance(record, Collective):
            self.batch.append(node)
        else:
            self.last[queue] = [node]
        if isinstance(record, Collective):
            self.works[record.work] = node
        issued_at = self.host_time if at is None else at
        if issued_at > self.all.now:
            self.all.push(issued_at, node, -1)
        else:
            self.release(node, None)
        return node

    def _queue(self, record: Collective) -> str:
        if record.kind in _POINT_TO_POINT and self.batch is None:
            return f"between {min(record.ranks)} and {max(record.ranks)}"
        return communicator_name(record)

    def release(self, node: _Node, cause: _Node | None) -> None:
        """One thing that the node waited for has happened."""
        node.waiting -= 1
        if node.waiting:
            return
        node.cause = cause
        if node.record is None:
            self._complete(node)
        elif node.meeting is None:
            self._ready(node)
        else:
            node.meeting.sides.append(node)
            if len(node.meeting.sides) == node.meeting.need:
                for side in node.meeting.sides:
                    side.rank._ready(side)

    def _ready(self, node: _Node) -> None:
        heapq.heappush(self.ready[node.cost.resource], (node.order, node))
        self._start(node.cost.resource)

    def _start(self, resource: Resource) -> None:
        if resource in self.running or not self.ready[resource]:
            return
        _, node = heapq.heappop(self.ready[resource])
        now = self.all.now
        node.start = node.since = now
        if resource in _NETWORK:
            self._change(lambda: self.running.__setitem__(resource, node))
        else:
            self.running[resource] = node
        if node.meeting is None:
            if not self.active and now > self.idle_since and _waited_for_others(node):
                self.idle.append((self.idle_since, now))
            self.active += 1
        self._schedule(node)

    def _slowdown(self, node: _Node) -> float:
        if node.cost.resource != "compute":
            return 1.0
        return self.all.host.slowdown(node.cost, [self.running[name].cost for name in _NETWORK if name in self.running])

    def _schedule(self, node: _Node) -> None:
        node.version += 1
        ends = self.all.now + node.remaining * self._slowdown(node)
        self.all.push(max(ends, node.earliest), node, node.version)

    def _change(self, change: Callable[[], object]) -> None:
        """Change what is on the network, and with it the speed of what is computed."""
        computing = self.running.get("compute")
        before = 1.0 if computing is None else self._slowdown(computing)
        change()
        if computing is not None and self._slowdown(computing) != before:
            computing.remaining = max(0.0, computing.remaining - (self.all.now - computing.since) / before)
            computing.since = self.all.now
            self._schedule(computing)

    def end(self, node: _Node) -> None:
        """A node is over on this rank."""
        resource = node.cost.resource
        if resource in _NETWORK:
            self._change(lambda: self.running.pop(resource))
        else:
            self.running.pop(resource)
        if node.meeting is None:
            self.active -= 1
            self.idle_since = self.all.now
            self._complete(node)
        else:
            node.version += 1
            node.meeting.finished += 1
            if node.meeting.finished == node.meeting.need:
                for side in node.meeting.sides:
                    side.rank._complete(side)
        self._start(resource)

    def _complete(self, node: _Node) -> None:
        node.done = True
        now = self.all.now
        if isinstance(node.record, ActionOp):
            self.segments.append((node.start, node.record.intervals))
        elif node.record is not None:
            self.intervals.append(Interval(node.record, node.cost, node.queue, node.start, now))
        if node.action >= 0:
            name, start, _ = self.actions[node.action]
            self.actions[node.action] = name, (node.start if start < 0 else min(start, node.start)), now
        followers, node.followers = node.followers, []
        for follower in followers:
            self.release(follower, node)
        if node.blocks:
            self.waited_for -= 1
            if not self.waited_for:
                self.blocked += max(0.0, now - self.host_time)
                self.host_time = max(self.host_time, now)
                self.go_on()

    def _block(self, nodes: Iterable[_Node]) -> bool:
        """Let the host wait for nodes; whether it must."""
        for node in unfinished(nodes):
            node.blocks = True
            self.waited_for += 1
        return self.waited_for > 0


def _waited_for_others(node: _Node) -> bool:
    """Whether what a node waited for last is something that ranks do together."""
    cause = node.cause
    while cause is not None and cause.record is None:
        cause = cause.cause
    return cause is not None and cause.meeting is not None
