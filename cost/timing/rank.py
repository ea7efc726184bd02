"""One rank of a simulation: its host, its streams and its resources."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from legoai.cost.timing.dependencies import StreamDependencies, communicator_name, pair_name, unfinished
from legoai.cost.timing.intervals import Intervals, SegmentIntervals
from legoai.cost.timing.meetings import Meetings
from legoai.cost.timing.nodes import LANES, NEVER, Lane, Node, Participant, stream_name
from legoai.cost.timing.operations import Operation
from legoai.cost.timing.rank_timeline import ActionOp, ActionTime, RankTimeline
from legoai.cost.timing.runs import Run, RunNode, RunTimes
from legoai.cost.timing.timeline import COMMUNICATION, Cost, Host, Interval, Resource, Timed, Timeline, left_by
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import (
    POINT_TO_POINT,
    Collective,
    Copy,
    HostKernel,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
)

_ON_DEVICE: Final = frozenset({Kernel, Collective, Copy})
_BY_HOST: Final = frozenset({ActionOp, HostKernel, HostWaitDevice, HostWaitEvent, HostWaitStream})
"""Other events that happen when the host reaches them; all remaining records take effect immediately."""
_LINKS: Final[tuple[Lane, ...]] = tuple(lane for name in COMMUNICATION for lane in LANES[name])


class Rank(StreamDependencies):
    """One rank: its host, its streams and its resources.

    Attributes:
        number: global rank.
        turn: number of times that its next event was announced.
        now: time up to which all events have happened.
        latest: end of the last operation of the device.
        host_time: time at which the host has finished everything so far.
        issues: time at which it issues the next operation; infinite while it waits, and at the end.
        next: that operation, with the number of its collective or event, or of a run's kernel.
        times: of runs, by identity.
        waited_for: nodes for which the host waits.
        running: the node on each lane.
        ready: nodes of each resource that could run, in the order in which they became ready, and else of issue.
        retimed: whether end times are up to date with the last begin or end of an operation.
        active: running nodes in which no other rank takes part.
        idle_since: time at which the last of them ended.
    """

    def __init__(
        self,
        number: int,
        operations: Iterator[tuple[Operation, int]],
        cost: Callable[[Timed], Cost],
        host: Host,
        meetings: Meetings,
    ) -> None:
        super().__init__()
        self.number, self.operations, self.cost, self.host, self.meetings = number, operations, cost, host, meetings
        self.turn = 0
        self.now = self.latest = self.host_time = self.issues = 0.0
        self.next: tuple[Operation | RunTimes, int] | None = None
        self.times: dict[int, RunTimes] = {}
        self.waiting = False
        self.waited_for = 0
        self.running: dict[Lane, Node] = {}
        self.ready: defaultdict[Resource, list[tuple[float, int, Node]]] = defaultdict(list)
        self.retimed = True
        self.active = 0
        self.idle_since = 0.0
        self.idle: list[tuple[float, float]] = []
        self.issued: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self.batch: list[Node] | None = None
        self.intervals: list[Interval] = []
        self.segments: list[tuple[float, SegmentIntervals]] = []
        self.marks: list[tuple[str, float]] = []
        self.action = -1
        self.actions: list[tuple[str, float, float]] = []

    @property
    def complete(self) -> bool:
        """Whether the host has issued everything, and everything is complete."""
        return (
            self.next is None
            and not self.waited_for
            and all(node.done for nodes in self.last.values() for node in nodes)
        )

    def stuck(self) -> str:
        """Return a description of what the rank waits for."""
        alone = [
            node
            for meeting in self.meetings.known.values()
            if len(meeting.sides) < meeting.need
            for rank, node in meeting.sides
            if rank is self
        ]
        names = {f"{node.record.kind} {node.record.ranks}" for node in alone if isinstance(node.record, Collective)}
        where = self.actions[-1][0] if self.actions else "its first action"
        return f"rank {self.number} after {where} for {', '.join(sorted(names)) or 'its own streams'}"

    def result(self) -> RankTimeline:
        """Return the timeline."""
        own = tuple(sorted(self.intervals, key=lambda item: (item.start, item.end)))
        intervals = Intervals([(0.0, SegmentIntervals(own, named=True)), *self.segments])
        ends = (at + float(segment.ends.max()) for at, segment in self.segments if segment.intervals)
        return RankTimeline(
            timeline=Timeline(
                intervals=intervals,
                marks=tuple(self.marks),
                end=max(self.latest, self.host_time, *ends),
            ),
            actions=tuple(ActionTime(*item) for item in self.actions if item[2] >= 0),
            waits=tuple(self.idle),
        )

    def begin(self) -> None:
        """Start the host."""
        self._take()

    def upcoming(self) -> float:
        """Return the time of the next event; infinite if another rank must act first."""
        if not self.retimed:
            self._retime()
        return min([self.issues, *(node.end for node in self.running.values())])

    def advance(self, limit: float) -> None:
        """Process events up to a time, or until another rank is affected."""
        running, concerned = self.running, self.meetings.concerned
        while not concerned:
            if not self.retimed:
                self._retime()
            finish, first = NEVER, None
            for node in running.values():
                if node.end < finish:
                    finish, first = node.end, node
            issues = self.issues
            if first is not None and finish <= issues:
                if finish > limit:
                    return
                self.now = finish
                self._end(first)
            elif issues > limit or issues == NEVER:
                return
            else:
                self.now = issues
                self._issue()

    def _take(self) -> None:
        """Advance the host to its next operation or wait; other records take effect on the way."""
        for found in self.operations:
            record, number = found
            if type(record) is Run:
                times = self._times(record)
                self.host_time += times.issues[0]
                self.next, self.issues = (times, 0), self.host_time
                return
            if type(record) in _ON_DEVICE:
                self.host_time += self.host.dispatch(record)  # type: ignore[arg-type]
            elif type(record) not in _BY_HOST:
                if type(record) is Mark:
                    self._mark(record.name)
                else:
                    self.synchronise(record, number)
                continue
            self.next = found
            self.issues = self.host_time
            return
        self.next = None
        self.issues = NEVER

    def _issue(self) -> None:
        """Issue the host's next operation."""
        assert self.next is not None
        record, number = self.next
        if type(record) is RunTimes:
            if not self._put_run(record, number):
                return
        elif isinstance(record, Kernel):
            self._put(record, self.cost(record))
        elif isinstance(record, Collective):
            self._communicate(record, number)
        elif isinstance(record, Copy):
            node = self._put(record, self.cost(record))
            if record.blocking:
                self._block([node])
        elif isinstance(record, ActionOp):
            cost = Cost(seconds=record.seconds, resource="compute", model="action")
            node = self._put(record, cost, earliest=self.host_time + record.latency)
            self.works.update(dict.fromkeys(record.works, node))
            self.events.update(dict.fromkeys(record.events, node))
            self.host_time += record.host_seconds
        elif isinstance(record, HostKernel):
            cost = self.cost(record)
            end = self.host_time + cost.seconds
            self.intervals.append(Interval(record, cost, "host", self.host_time, end))
            self.host_time = end  # so that no interval of the host ends after it
        elif isinstance(record, HostWaitDevice):
            self._block(node for nodes in self.last.values() for node in nodes)
        elif isinstance(record, HostWaitStream):
            self._block(self.pending(stream_name(record.stream)))
        elif isinstance(record, HostWaitEvent):
            found = self.events.get(number)
            self._block([found] if found is not None else [])
        if not self.waiting:
            self._take()

    def _block(self, nodes: Iterable[Node]) -> None:
        """Make the host wait for nodes."""
        for node in unfinished(nodes):
            node.blocks = True
            self.waited_for += 1
        if self.waited_for:
            self.waiting, self.issues = True, NEVER

    def _resume(self) -> None:
        """Resume the host if it has nothing left to wait for."""
        if not self.waited_for:
            self.waiting = False
            self.host_time = max(self.host_time, self.now)
            self._take()

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

    def _put(self, record: Kernel | Copy | ActionOp, cost: Cost, *, earliest: float = 0.0) -> Node:
        """Put an operation on its stream."""
        stream = stream_name(record.stream)
        node = self.node(record, cost, stream)
        node.action, node.earliest = self.action, earliest
        self.put(node, stream, self.host_time)
        node.soonest += cost.seconds
        self.last[stream] = [node]
        self.release(node)
        return node

    def _put_run(self, times: RunTimes, first: int) -> bool:
        """Put kernels of a run on its stream, from a given one on; return whether none is left."""
        self.order += 1
        node = RunNode(self.order, times, first)
        stream, node.action = node.queue, self.action
        self.put(node, stream, self.host_time)
        end = node.until = node.last = times.together(first, node.soonest - self.host_time)
        node.soonest += times.alone[end] - times.alone[first]
        self.last[stream] = [node]
        self.release(node)
        self.host_time += times.issues[end - 1] - times.issues[first]
        if end == len(times.costs):
            return True
        self.host_time += times.issues[end] - times.issues[end - 1]
        self.next, self.issues = (times, end), self.host_time
        return False

    def _times(self, run: Run) -> RunTimes:
        found = self.times.get(id(run))
        if found is None:
            found = self.times[id(run)] = RunTimes(run, self.cost, self.host)
        return found

    def _communicate(self, record: Collective, number: int) -> None:
        """Put a collective or a transfer on the queue of its communicator."""
        between = record.kind in POINT_TO_POINT
        queue = pair_name(record) if between and self.batch is None else communicator_name(record)
        node = self.node(record, self.cost(record), queue)
        node.action = self.action
        if between:
            node.lanes = node.lanes[:1] if record.kind == "send" else node.lanes[-1:]
        if not self.meetings.alone:
            alike = ("between", record.ranks) if between else (record.kind, record.ranks)
            node.meeting = self.meetings.of(record, self.issued[alike])
            self.issued[alike] += 1
        self.put(node, stream_name(record.stream), self.host_time)
        node.soonest += node.cost.seconds
        if self.batch is None:
            self.last[queue] = [node]
        else:
            self.batch.append(node)
        self.works[number] = node
        self.release(node)

    def release(self, node: Node) -> None:
        """Note that one of a node's predecessors is complete."""
        node.waiting -= 1
        if node.waiting:
            return
        meeting = node.meeting
        if node.record is None:
            self._complete(node)
        elif meeting is None:
            self._enter(node)
        else:
            meeting.sides.append((self, node))
            if len(meeting.sides) == meeting.need:
                for rank, side in meeting.sides:
                    rank.meet(side, self)

    def meet(self, node: Node, last: Participant) -> None:
        """Begin a side of a joint operation, as the last rank has arrived."""
        if last is not self:
            self.now = last.now
            self.meetings.concerned.append(self)
        self._enter(node)

    def part(self, node: Node, last: Participant) -> None:
        """Complete a side of a joint operation, as it has ended on the last rank."""
        if last is self:
            self._complete(node)
            return
        self.now = last.now
        self.meetings.concerned.append(self)
        self._complete(node)
        if self.waiting:
            self._resume()

    def _enter(self, node: Node) -> None:
        """Run a node, or queue it until its lanes are free."""
        ready = self.ready[node.cost.resource]
        if not ready and self.running.keys().isdisjoint(node.lanes):
            self._start(node)
            return
        heapq.heappush(ready, (self.now, node.order, node))
        self._start_ready(node.cost.resource)

    def _start_ready(self, resource: Resource) -> None:
        """Run the queued nodes of a resource whose lanes are free and not those of an earlier one that waits."""
        ready, taken, waiting = self.ready[resource], set(self.running), []
        while ready and not taken.issuperset(LANES[resource]):
            item = heapq.heappop(ready)
            node = item[-1]
            if taken.isdisjoint(node.lanes):
                self._start(node)
            else:
                waiting.append(item)
            taken.update(node.lanes)
        for item in waiting:
            heapq.heappush(ready, item)
        running = self.running.get("compute") if ready else None
        if isinstance(running, RunNode) and ready is self.ready[running.cost.resource]:
            running.give_way(self.now)  # its next kernel becomes ready after these

    def _start(self, node: Node) -> None:
        """Run a node."""
        now = self.now
        node.begin(now)
        if node.meeting is None:
            if node.late and not self.active and now > self.idle_since:
                self.idle.append((self.idle_since, now))
            self.active += 1
        self.running.update(dict.fromkeys(node.lanes, node))
        self.retimed = False

    def _retime(self) -> None:
        """Slow down the kernel that runs beside communication, or restore its speed."""
        self.retimed = True
        node = self.running.get("compute")
        if node is None:
            return
        beside = [item.cost for item in dict.fromkeys(self.running[name] for name in _LINKS if name in self.running)]
        node.slow(self.now, self.host, left_by(beside) if beside else None)

    def _end(self, node: Node) -> None:
        """End a running node."""
        for lane in node.lanes:
            del self.running[lane]
        self.retimed = False
        meeting = node.meeting
        if meeting is None:
            self.active -= 1
            self.idle_since = self.now
            if isinstance(node, RunNode) and node.until < node.last:
                self._note(node)
                node.go_on()
                self._enter(node)
            else:
                self._complete(node)
        else:
            meeting.finished += 1
            if meeting.finished == meeting.need:
                for rank, side in meeting.sides:
                    rank.part(side, self)
        if self.ready[node.cost.resource]:
            self._start_ready(node.cost.resource)
        if self.waiting:
            self._resume()

    def _complete(self, node: Node) -> None:
        """Mark a node as complete, and release its followers."""
        node.done = True
        if node.record is not None:
            self._note(node)
            node.late = node.meeting is not None
        if node.blocks:
            self.waited_for -= 1
        followers, late = node.followers, node.late
        if followers:
            node.followers = []
            for follower in followers:
                follower.late = late
                self.release(follower)

    def _note(self, node: Node) -> None:
        """Record the interval of a node, up to now."""
        record, now = node.record, self.now
        if isinstance(record, ActionOp):
            self.segments.append((node.start, record.intervals))
        elif record is not None:
            self.intervals.append(Interval(record, node.taken(), node.queue, node.start, now))
            self.latest = now
        if node.action >= 0:
            name, start, _ = self.actions[node.action]
            self.actions[node.action] = name, (node.start if start < 0 else min(start, node.start)), now
