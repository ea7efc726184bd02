"""Simulation of one rank: streams, the host before them, and resources that they share.

The semantics are those of section 4.6 of the LegoAI dissertation (Algorithms 1 to 6, Table 4.6): a stream runs its
operations in order, waits release when what they name is complete, and an operation needs its resource. Here they are
driven by events: time jumps from one completion to the next, and only what a completion releases is looked at, where
the paper's loop scans all queues.

Three things are added. The host dispatches operations one after another and each takes it time, so that a stream of
small kernels runs at the host's pace. A collective runs on its communicator's own queue and not on the stream that
asked for it, as NCCL's do (:mod:`legoai.cost.timing.dependencies`). And while a collective runs, computation beside it
is slower, because the collective takes some of the multiprocessors.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from legoai.cost.timing.dependencies import Queues, communicator_name, stream_name
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.records import (
    Allocate,
    Categorise,
    Collective,
    Copy,
    Free,
    HostKernel,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    Resize,
)
from legoai.cost.trace.trace import Trace, records_of

Resource = Literal["compute", "intra_host", "inter_host", "host_to_device", "device_to_host", "host"]
Timed: TypeAlias = Kernel | HostKernel | Collective | Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one operation takes when nothing runs beside it.

    Attributes:
        seconds: its time on the device.
        resource: what it occupies.
        model: the model that gave the time.
        beside: of a kernel, its time while a collective has some of the multiprocessors over its time alone; None where
            that is not known for its class, so that :attr:`Host.compute_slowdown` is taken.
        memory: the share of the memory's bandwidth that it takes while it runs alone, of what kernels reach.
        processors: of a collective, whether it runs on multiprocessors and not on copy engines.
    """

    seconds: float
    resource: Resource
    model: str
    beside: float | None = None
    memory: float = 0.0
    processors: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """How fast operations are put on streams, and how much communication slows computation.

    Attributes:
        dispatch_seconds: host time of one operation that C++ issues, as autograd does in a backward pass; 0 where the
            host is never the bottleneck, as in a replayed graph.
        python_seconds: of one that a module issues in Python, with what Python does between two; None where that is not
            known, so that it is as the former.
        compute_slowdown: the time of a kernel beside a collective over its time alone, at least 1, where nothing is
            known of the kernel's class.
    """

    dispatch_seconds: float = 0.0
    python_seconds: float | None = None
    compute_slowdown: float = 1.0

    def dispatch(self, record: Timed) -> float:
        """Seconds to put an operation on its stream; 0 in a CUDA graph, whose kernels the host starts all at once.

        Of a compiled module little Python is left: its fused kernels take what C++ takes.
        """
        if self.python_seconds is None or type(record) is not Kernel or record.phase == "backward":
            replayed = type(record) is Kernel and "replayed" in record.attributes
            return 0.0 if replayed else self.dispatch_seconds
        if "replayed" in record.attributes:
            return 0.0
        return self.dispatch_seconds if record.op.startswith("fused(") else self.python_seconds

    def slowdown(self, kernel: Cost, collectives: Sequence[Cost]) -> float:
        """The time of a kernel beside collectives over its time alone.

        They take multiprocessors from it, if they run on any, and bandwidth of the memory, of which it has what they
        leave; what is scarcer counts.
        """
        if not collectives:
            return 1.0
        processors = 1.0
        if any(item.processors for item in collectives):
            processors = self.compute_slowdown if kernel.beside is None else kernel.beside
        left = max(_LEAST_LEFT, 1 - sum(item.memory for item in collectives))
        return max(1.0, processors, kernel.memory / left)


@dataclass(frozen=True, slots=True)
class Interval:
    """One operation's time on the device, in seconds from the beginning of the trace."""

    record: Timed
    cost: Cost
    queue: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When everything ran.

    Attributes:
        intervals: by start.
        marks: (name, host time) of each mark.
        end: when the last operation or the host was done.
        host_blocked: seconds for which the host waited for the device.
    """

    intervals: Sequence[Interval]
    marks: tuple[tuple[str, float], ...]
    end: float
    host_blocked: float


class _Node:
    """An operation on its way through the simulation.

    Attributes:
        waiting: predecessors that are not complete; one of them is the host's dispatch.
        end: when it is complete if it runs and nothing changes; infinite until that is known.
        factor: how much slower than alone it runs.
    """

    __slots__ = ("cost", "done", "end", "factor", "followers", "order", "queue", "record", "start", "waiting")

    def __init__(self, order: int, record: Timed | None, cost: Cost, queue: str) -> None:
        self.order = order
        self.record = record
        self.cost = cost
        self.queue = queue
        self.waiting = 1
        self.followers: list[_Node] = []
        self.done = False
        self.start = 0.0
        self.end = _NEVER
        self.factor = 1.0


_ON_DEVICE: Final = (Kernel, Collective, Copy)
_MEMORY: Final = frozenset({Allocate, Categorise, Free, Resize})
"""Records that take no time."""
_NEVER: Final = float("inf")
_NETWORK: Final[tuple[Resource, ...]] = ("intra_host", "inter_host")
_LEAST_LEFT: Final = 0.1
"""Share of the memory's bandwidth that is left to a kernel, however much collectives are said to take."""
_INSTANT: Final = Cost(seconds=0.0, resource="compute", model="synchronisation")


def simulate(trace: Trace, cost: Callable[[Timed], Cost], host: Host) -> Timeline:
    """Run the trace's operations.

    Raises:
        ValueError: the trace waits for work that it never started.
    """
    with uncollected():
        return _Simulation(cost, host).run(trace)


class _Simulation(Queues[_Node]):
    def __init__(self, cost: Callable[[Timed], Cost], host: Host) -> None:
        super().__init__()
        self.cost = cost
        self.host = host
        self.now = 0.0
        self.ready: dict[Resource, list[tuple[int, _Node]]] = defaultdict(list)
        self.running: dict[Resource, _Node] = {}
        self.retimed = True
        """Whether what runs knows when it ends, since the last time that something began or ended."""
        self.intervals: list[Interval] = []
        self.blocked = 0.0
        self.order = 0

    def run(self, trace: Trace) -> Timeline:
        marks: list[tuple[str, float]] = []
        host_time = 0.0
        for record in records_of(trace.items, trace.translation) if trace.segmented else trace.items:
            if type(record) in _MEMORY:
                continue
            if isinstance(record, Mark):
                marks.append((record.name, host_time))
            elif isinstance(record, _ON_DEVICE):
                host_time += self.host.dispatch(record)
                self._advance(host_time)
                node = self._put(record)
                if isinstance(record, Copy) and record.blocking:
                    host_time = self._block([node], host_time)
            elif isinstance(record, HostKernel):
                self._advance(host_time)
                host_time = self._compute_on_host(record, host_time)
            elif isinstance(record, HostWaitDevice):
                host_time = self._block([node for nodes in self.last.values() for node in nodes], host_time)
            elif isinstance(record, HostWaitStream):
                host_time = self._block(self.pending(stream_name(record.stream)), host_time)
            elif isinstance(record, HostWaitEvent):
                found = self.events.get(record.event)
                host_time = self._block([found] if found is not None else [], host_time)
            else:
                self.synchronise(record)
        self._advance(float("inf"))
        end = max((interval.end for interval in self.intervals), default=0.0)
        return Timeline(
            intervals=tuple(sorted(self.intervals, key=lambda item: (item.start, item.end))),
            marks=tuple(marks),
            end=max(end, host_time),
            host_blocked=self.blocked,
        )

    def _compute_on_host(self, record: HostKernel, host_time: float) -> float:
        """Let the host compute; the time at which it goes on. The device runs beside it."""
        cost = self.cost(record)
        end = host_time + cost.seconds
        self.intervals.append(Interval(record, cost, "host", host_time, end))
        return end

    def joint(self) -> _Node:
        """Return a node that takes no time."""
        return _Node(self._next(), None, _INSTANT, "")

    def dispatched(self, node: _Node) -> None:
        """Take note that the host has issued a node."""
        self._release(node)

    def _put(self, record: Kernel | Collective | Copy) -> _Node:
        stream = stream_name(record.stream)
        queue = communicator_name(record) if isinstance(record, Collective) else stream
        node = _Node(self._next(), record, self.cost(record), queue)
        self.put(node, stream, queue)
        self.last[queue] = [node]
        if isinstance(record, Collective):
            self.works[record.work] = node
        self._release(node)
        return node

    def _next(self) -> int:
        self.order += 1
        return self.order

    def _release(self, node: _Node) -> None:
        """One thing that the node waited for has happened."""
        node.waiting -= 1
        if node.waiting:
            return
        if node.record is None:
            self._complete(node)
        else:
            heapq.heappush(self.ready[node.cost.resource], (node.order, node))
            self._start(node.cost.resource)

    def _start(self, resource: Resource) -> None:
        if resource in self.running or not self.ready[resource]:
            return
        _, node = heapq.heappop(self.ready[resource])
        node.start = self.now
        node.end = self.now + node.cost.seconds
        self.running[resource] = node
        self.retimed = False

    def _complete(self, node: _Node) -> None:
        node.done = True
        if node.record is not None:
            self.intervals.append(Interval(node.record, node.cost, node.queue, node.start, self.now))
        for follower in node.followers:
            self._release(follower)
        node.followers.clear()

    def _retime(self) -> None:
        """Slow the kernel that runs beside communication, or let it run freely again."""
        self.retimed = True
        node = self.running.get("compute")
        if node is None:
            return
        factor = self.host.slowdown(node.cost, [self.running[name].cost for name in _NETWORK if name in self.running])
        if factor != node.factor:
            node.end = self.now + max(0.0, node.end - self.now) / node.factor * factor
            node.factor = factor

    def _step(self, limit: float) -> bool:
        """Go to the next completion, or to ``limit`` if that comes first; whether something was completed."""
        if not self.retimed:
            self._retime()
        finish, first = _NEVER, None
        for resource, node in self.running.items():
            if node.end < finish:
                finish, first = node.end, resource
        if first is None or finish > limit:
            if self.now < limit != _NEVER:
                self.now = limit
            return False
        self.now = max(self.now, finish)
        node = self.running.pop(first)
        self.retimed = False
        self._complete(node)
        self._start(first)
        return True

    def _advance(self, until: float) -> None:
        while self._step(until):
            pass

    def _block(self, nodes: Sequence[_Node], host_time: float) -> float:
        """Let the host wait for ``nodes``; the time at which it goes on."""
        self._advance(host_time)
        while not all(node.done for node in nodes):
            completed = self._step(float("inf"))
            assert completed, "the device stands still while the host waits: a cycle of waits"
        self.blocked += max(0.0, self.now - host_time)
        return max(host_time, self.now)
