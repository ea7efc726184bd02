"""Cost of each op on a machine, when nothing runs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from legoai.cost.machine import collective_time, kernel_time
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.collective_time import slowest_placement
from legoai.cost.machine.contention import beside_collectives, memory_of_collective, memory_share
from legoai.cost.profiles import Profile, profile
from legoai.cost.timing.timeline import Cost, Host, Resource, Timed
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel, TensorType

_KERNELS: Final = (Kernel, HostKernel)
_MANY: Final = 16
"""Most tensors of a list operation by which its cost is cached: comparing more takes longer than computing the cost."""


@dataclass(slots=True, kw_only=True)
class OpCosts:
    """Costs of the ops of a machine, each computed once.

    Attributes:
        machine: where they run.
        known: computed costs, apart from those of kernels.
        kernels: computed costs of kernels, which are the same on every machine with the profile.
        gap: seconds between two queued kernels.
        copies: bytes per second between host and device by direction, and the model that estimated them.
    """

    machine: Machine
    known: dict[object, Cost] = field(default_factory=dict)
    kernels: dict[object, Cost] = field(default_factory=dict)
    seen: dict[object, tuple[Timed, Cost]] = field(default_factory=dict)
    """Computed costs by the identity of an operation's fields, with the operation, which keeps them alive."""
    gap: float = 0.0
    copies: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    calls: Host | None = None
    """On a CPU, the host's calls, which keep it from computing; elsewhere the device computes meanwhile."""
    host: Profile | None = None
    """Profile of the processor for operators on host memory; loaded on first use."""

    def __post_init__(self) -> None:
        self.kernels = self.machine.profile.kernels
        self.gap = self.machine.constant("kernel_gap_seconds") or 0.0
        if self.machine.device.kind == "cpu":
            self.calls = Host(calls=self.machine.calls())
        self.copies = {name: _copy_rate(self.machine, name) for name in ("host_to_device", "device_to_host")}

    def __call__(self, record: Timed) -> Cost:
        """Return the cost of an operation when nothing runs beside it.

        Raises:
            NoModelError: the profile has no rate for a kernel.
            ProfileError: the profile has no measurement of collectives.
        """
        cost = self.alone(record)
        if self.calls is None or isinstance(record, HostKernel) or not record.calls:
            return cost
        return replace(cost, seconds=cost.seconds + self.calls.dispatch(record))

    def alone(self, record: Timed) -> Cost:
        """The cost without the calls before it."""
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
            machine = self.machine
            hosts = slowest_placement(record, machine.network, machine.profile, machine.world).hosts
            memory = memory_of_collective(record, seconds, self.machine.profile)
            resource: Resource = "intra_host" if hosts == 1 else "inter_host"
            slowdown = None if record.kind == "peer_copy" else machine.slowdown(resource)
            return Cost(seconds=seconds, resource=resource, model=model, memory=memory, slowdown=slowdown)
        if isinstance(record, HostKernel):
            return self._on_host(record)
        return self._copy(record)

    def _on_processors(self, record: Kernel) -> Cost:
        profile = self.machine.profile
        work = kernel_time.work_on(record, profile)
        seconds, model = kernel_time.seconds_of(work, profile)
        return Cost(
            seconds=seconds + self.gap,
            resource="compute",
            model=model,
            beside=beside_collectives(work, profile),
            memory=memory_share(work.bytes, seconds, profile),
        )

    def _communication(self, record: Collective) -> tuple[float, str]:
        machine = self.machine
        return collective_time.estimate(record, machine.network, machine.profile, world=machine.world)

    def _peer_copy(self, record: Collective) -> tuple[float, str]:
        """Time over the link by a copy engine; that of a send where the profile does not state the engine's rate."""
        share = self.machine.constant("peer_copy_share")
        if share is None:
            return self._communication(record)
        rate = share * self.machine.device.figure("link.bandwidth_bytes_per_second")
        return self.gap + record.bytes / rate, kernel_time.ROOFLINE

    def _on_host(self, record: HostKernel) -> Cost:
        """Time of an operator on the host: that of the catalogue's `cpu`, as profiles do not describe hosts."""
        if self.host is None:
            self.host = self.machine.profile if self.machine.device.kind == "cpu" else profile("cpu")
        seconds, model = kernel_time.estimate(_on_device(record), self.host)
        return Cost(seconds=seconds, resource="host", model=f"{model}, of the profile `{self.host.name}`")

    def _copy(self, copy: Copy) -> Cost:
        if copy.direction == "device_to_device" or self.machine.device.kind == "cpu":
            cost = self._on_processors(_as_kernel(copy))
            # On a CPU, device memory is host memory: nothing is copied between the two.
            seconds = cost.seconds - self.gap if copy.direction == "device_to_device" else 0.0
            return replace(cost, seconds=seconds)
        rate, model = self.copies[copy.direction]
        resource: Resource = "host_to_device" if copy.direction == "host_to_device" else "device_to_host"
        return Cost(seconds=self.gap + copy.bytes / rate, resource=resource, model=model)


def _copy_rate(machine: Machine, direction: str) -> tuple[float, str]:
    """Bytes per second between host and device: measured, or else from the datasheet of the link."""
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
    """A cheap key, equal only for operations that cost the same: repeated operations share their fields."""
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
