"""Random traces of a rank with operations of every kind, and their costs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from legoai.cost.timing.timeline import Beside, Cost, Host
from legoai.cost.trace.records import (
    Allocate,
    Collective,
    Copy,
    Free,
    HostKernel,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    RecordEvent,
    WaitEvent,
    WaitStream,
    WaitWork,
)

HOSTS = (
    Host(),
    Host(dispatch_seconds=0.37, compute_slowdown=1.25),
    Host(dispatch_seconds=0.11, python_seconds=0.53, compute_slowdown=1.1),
)


def price(record: Any) -> Cost:
    """A cost computed from the fields of a record, with digits that no sum of others has."""
    if isinstance(record, Kernel):
        sensitive = record.flops % 3
        return Cost(
            seconds=record.flops / 997, resource="compute", model="test",
            beside=(None, Beside(1.0), Beside(0.37, 1.0))[sensitive], memory=(0.0, 0.31, 0.93)[sensitive],
        )  # fmt: skip
    if isinstance(record, HostKernel):
        return Cost(seconds=record.flops / 991, resource="host", model="test")
    if isinstance(record, Collective):
        resource = "inter_host" if record.axis == "pp" or record.bytes % 2 else "intra_host"
        return Cost(
            seconds=record.bytes / 983, resource=resource, model="test", memory=0.4 * (record.bytes % 5 == 0),
            slowdown=1.0 if record.bytes % 7 else None,
        )  # fmt: skip
    on_link = record.direction if record.direction != "device_to_device" else "compute"
    return Cost(seconds=record.bytes / 977, resource=on_link, model="test")


class Program:
    """Random records of one rank, valid as a program's are."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.works, self.events, self.storages = itertools.count(), itertools.count(), itertools.count()
        self.started: list[int] = []
        self.recorded: list[int] = []

    def records(self, count: int) -> Iterator[Any]:
        """Yield records of every kind that concern no other rank."""
        chance, kinds = self.random, ["kernel"] * 8 + [
            "collective", "collective", "collective", "copy", "host", "event", "event", "wait", "wait", "stream",
            "work", "work", "memory", "device", "until stream", "until event",
        ]  # fmt: skip
        for _ in range(count):
            yield from self._one(chance.choice(kinds))

    def _one(self, kind: str) -> Iterator[Any]:
        chance = self.random
        stream, phase = chance.choice([0, 0, 0, 7, 8]), chance.choice(["forward", "backward"])
        where = {"module": "layers.0", "phase": phase}
        work = {"op": chance.choice(["aten.mm", "fused(aten.mul)"]), "inputs": (), "outputs": (),
                "flops": chance.randint(1, 2500), "bytes_read": 0, "bytes_written": 0, **where}  # fmt: skip
        if kind == "kernel":
            issuer = "python" if phase == "forward" and work["op"] == "aten.mm" else "node"
            replayed = {"replayed": True} if chance.random() < 0.1 else {}
            yield Kernel(stream=stream, attributes=replayed, issuer=issuer, **work)
        elif kind == "host":
            yield HostKernel(attributes={}, **work)
        elif kind == "collective":
            yield self.collective(stream, "all_gather", (0, 64), chance.choice(["dp_shard", "tp", ""]))
        elif kind == "copy":
            direction = chance.choice(["host_to_device", "device_to_host", "device_to_device"])
            yield Copy(stream=stream, direction=direction, bytes=chance.randint(1, 1500),
                       blocking=chance.random() < 0.3, **where)  # fmt: skip
        elif kind == "event":
            self.recorded.append(next(self.events) if chance.random() < 0.7 or not self.recorded else self.recorded[0])
            yield RecordEvent(self.recorded[-1], stream)
        elif kind == "wait" and self.recorded:
            yield WaitEvent(stream, chance.choice(self.recorded))
        elif kind == "until event" and self.recorded:
            yield HostWaitEvent(chance.choice(self.recorded))
        elif kind == "until stream":
            yield HostWaitStream(stream)
        elif kind == "device" and chance.random() < 0.5:
            yield HostWaitDevice()
        elif kind == "stream":
            yield WaitStream(*chance.sample([0, 7, 8], 2))
        elif kind == "work" and self.started:
            yield WaitWork(stream, chance.choice(self.started[-3:]))
        elif kind == "memory":
            storage = next(self.storages)
            yield Allocate(storage=storage, bytes=512, stream=0, category="other", **where)
            yield Free(storage)

    def collective(self, stream: int, kind: Any, ranks: tuple[int, ...], axis: str) -> Collective:
        """Return a collective or a transfer, and take note of it."""
        self.started.append(next(self.works))
        return Collective(
            work=self.started[-1], stream=stream, kind=kind, ranks=ranks, axis=axis, bytes=self.random.randint(1, 2500),
            dtype="float32", module="layers.0", phase="forward",
        )  # fmt: skip

    def alone(self) -> list[Any]:
        """Return the records of a rank that is simulated alone."""
        return [Mark("step 1"), *self.records(120), Mark("end step 1"), *self.records(20)]
