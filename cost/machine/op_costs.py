"""Cost of each op on a machine, when nothing runs beside it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from legoai.cost.kernels.work import work_of
from legoai.cost.machine import collective_time, kernel_time
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.contention import beside_collectives, memory_of_collective, memory_share
from legoai.cost.network.topology import placement
from legoai.cost.profiles import Profile, profile
from legoai.cost.timing.timeline import Cost, Resource, Timed
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel, TensorType

_KERNELS: Final = (Kernel, HostKernel)
_MANY: Final = 16
"""Tensors of an operation on lists of them: to compare more takes longer than to compute what the operation costs."""


@dataclass(slots=True, kw_only=True)
class OpCosts:
    """Costs of the ops of a machine, each computed once.

    Attributes:
        machine: where they run.
        known: costs that were given, but for those of kernels.
        kernels: those of kernels, which are the same on every machine with the profile.
        gap: seconds between two kernels that are queued.
        copies: bytes per second between host and device by direction, and the model that says so.
    """

    machine: Machine
    known: dict[object, Cost] = field(default_factory=dict)
    kernels: dict[object, Cost] = field(default_factory=dict)
    seen: dict[object, tuple[Timed, Cost]] = field(default_factory=dict)
    """The same by the identity of what an operation has, with the operation, which keeps that alive."""
    gap: float = 0.0
    copies: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    host: Profile | None = None
    """Of the processor that computes what is in host memory; read when it is first asked for."""

    def __post_init__(self) -> None:
        self.kernels = _of_kernels(self.machine.profile)
        self.gap = self.machine.constant("kernel_gap_seconds") or 0.0
        self.copies = {name: _copy_rate(self.machine, name) for name in ("host_to_device", "device_to_host")}

    def __call__(self, record: Timed) -> Cost:
        """The cost of an operation when nothing runs beside it.

        Raises:
            NoModelError: the profile has no rate for what a kernel does.
            ProfileError: the profile has no measurement of collectives.
        """
        same = _identity(record)
        found = self.seen.get(same)
        if found is not None:
            return found[1]
        if isinstance(record, _KERNELS) and len(record.inputs) + len(record.outputs) > _MANY:
            cost = self._cost(record)
        else:
            cost = self._known(record)
        self.seen[same] = record, cost
        return cost

    def _known(self, record: Timed) -> Cost:
        key, known = _key(record), self.kernels if isinstance(record, Kernel) else self.known
        cost = known.get(key)
        if cost is None:
            cost = known[key] = self._cost(record)
        return cost

    def _cost(self, record: Timed) -> Cost:
        if isinstance(record, Kernel):
            return self._on_processors(record)
        if isinstance(record, Collective):
            seconds, model = self._peer_copy(record) if record.kind == "peer_copy" else self._communication(record)
            hosts = placement(record.ranks, self.machine.network.devices_per_host).hosts
            memory = memory_of_collective(record, seconds, self.machine.profile)
            resource: Resource = "intra_host" if hosts == 1 else "inter_host"
            on_processors = record.kind != "peer_copy"
            return Cost(seconds=seconds, resource=resource, model=model, memory=memory, processors=on_processors)
        if isinstance(record, HostKernel):
            return self._on_host(record)
        return self._copy(record)

    def _on_processors(self, record: Kernel) -> Cost:
        profile = self.machine.profile
        work = work_of(record)
        seconds, model = kernel_time.seconds_of(work, profile)
        return Cost(
            seconds=seconds + self.gap,
            resource="compute",
            model=model,
            beside=beside_collectives(work, profile),
            memory=memory_share(work.bytes, seconds, profile),
        )

    def _communication(self, record: Collective) -> tuple[float, str]:
        return collective_time.estimate(record, self.machine.network, self.machine.profile)

    def _peer_copy(self, record: Collective) -> tuple[float, str]:
        """Over the link, by a copy engine; as a send where the profile does not say how fast that is."""
        share = self.machine.constant("peer_copy_share")
        if share is None:
            return self._communication(record)
        rate = share * self.machine.device.figure("link.bandwidth_bytes_per_second")
        return self.gap + record.bytes / rate, kernel_time.ROOFLINE

    def _on_host(self, record: HostKernel) -> Cost:
        """The time of an operator on the host: that of the catalogue's `cpu`, as no profile knows the device's own."""
        if self.host is None:
            self.host = self.machine.profile if self.machine.device.kind == "cpu" else profile("cpu")
        seconds, model = kernel_time.estimate(_on_device(record), self.host)
        return Cost(seconds=seconds, resource="host", model=f"{model}, of the profile `{self.host.name}`")

    def _copy(self, copy: Copy) -> Cost:
        if copy.direction == "device_to_device" or self.machine.device.kind == "cpu":
            cost = self._on_processors(_as_kernel(copy))
            # What is on a cpu is on its host already: nothing is moved between the two.
            seconds = cost.seconds - self.gap if copy.direction == "device_to_device" else 0.0
            return replace(cost, seconds=seconds)
        rate, model = self.copies[copy.direction]
        resource: Resource = "host_to_device" if copy.direction == "host_to_device" else "device_to_host"
        return Cost(seconds=self.gap + copy.bytes / rate, resource=resource, model=model)


@functools.lru_cache(maxsize=4)
def _of_kernels(profile: Profile) -> dict[object, Cost]:
    """Costs of kernels that were given, by what decides them: a search asks for the same ones time and again."""
    return {}


def _copy_rate(machine: Machine, direction: str) -> tuple[float, str]:
    """Bytes per second between host and device: measured, else the datasheet's of the link."""
    measured = machine.constant(f"{direction}_bytes_per_second")
    if measured is not None:
        return measured, kernel_time.MEASURED
    if machine.device.kind == "cpu":
        return float("inf"), "analytical"
    return machine.device.figure("host_link.bandwidth_bytes_per_second"), kernel_time.ROOFLINE


def _on_device(record: HostKernel) -> Kernel:
    return Kernel(stream=0, **{name: getattr(record, name) for name in HostKernel.__slots__})


def _as_kernel(copy: Copy) -> Kernel:
    whole = (TensorType((copy.bytes,), "uint8"),)
    return Kernel(
        stream=copy.stream, op="aten.copy_", inputs=whole, outputs=(), flops=0, bytes_read=copy.bytes,
        bytes_written=copy.bytes, attributes={}, module=copy.module, phase=copy.phase,
    )  # fmt: skip


def _identity(record: Timed) -> object:
    """A key that is cheap, and equal only for operations that cost the same: repeated ones share what they have."""
    if isinstance(record, _KERNELS):
        return (
            type(record), record.op, id(record.inputs), id(record.outputs), id(record.attributes), record.flops,
            record.bytes_read, record.bytes_written,
        )  # fmt: skip
    if isinstance(record, Collective):
        return record.kind, id(record.ranks), record.bytes
    return record.direction, record.bytes


def _key(record: Timed) -> object:
    if isinstance(record, _KERNELS):
        attributes = tuple(sorted((name, str(value)) for name, value in record.attributes.items()))
        return (
            type(record), record.op, record.inputs, record.outputs, record.flops, record.bytes_read,
            record.bytes_written, attributes,
        )  # fmt: skip
    if isinstance(record, Collective):
        return record.kind, record.ranks, record.bytes
    return record.direction, record.bytes
