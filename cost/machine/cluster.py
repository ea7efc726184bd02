"""On which devices and networks does a plan run, and what does one operation take there?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from legoai.cost import kernels, network
from legoai.cost.machine.contention import beside_collectives, memory_of_collective, memory_share
from legoai.cost.network import Network
from legoai.cost.network.topology import placement
from legoai.cost.profiles import Profile, ProfileError, load, profile, profile_names
from legoai.cost.timing.timeline import Cost, Host, Resource, Timed
from legoai.cost.trace.records import Collective, Copy, HostKernel, Kernel, TensorType
from legoai.specs.cluster import CatalogueError, Cluster, Device, device, fabric, load_profile
from legoai.specs.directives.cluster import ClusterUse

PROFILE_SUFFIX: Final = ".json.gz"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """A cluster, and what is known of its speed.

    Attributes:
        cluster: the hosts, their devices, and the fabric between them.
        profile: of the device.
        network: of the cluster.
    """

    cluster: Cluster
    profile: Profile
    network: Network

    @property
    def device(self) -> Device:
        """One of its devices."""
        return self.cluster.device

    def constant(self, name: str) -> float | None:
        """A constant of the profile; None where it states none."""
        found = self.profile.constants.get(name)
        return None if found is None else found.value

    def host(self) -> Host:
        """How fast operations are put on streams here, and what communication takes from computation.

        On a cpu the host computes itself. The time of a kernel that was measured there holds that of its dispatch; the
        two lie beside each other here, so that the longer counts, and not both.
        """
        return Host(
            dispatch_seconds=self.constant("dispatch_seconds") or 0.0,
            python_seconds=self.constant("python_seconds"),
            compute_slowdown=max(1.0, self.constant("compute_slowdown") or 1.0),
        )

    def peak(self, dtype: str) -> tuple[float, str]:
        """Floating-point operations per second of dense products of a dtype, and where the figure is from.

        Raises:
            ProfileError: neither the device's datasheet nor its profile has a rate for the dtype.
        """
        try:
            return self.device.peak(dtype), f"datasheet of {self.device.name}"
        except CatalogueError:
            model = self.profile.products.get(dtype)
            if model is None:
                raise ProfileError(f"neither the catalogue nor the profile has a rate for {dtype}") from None
            return model.curve.peak, f"profile of {self.profile.name}"


def machine_of(use: ClusterUse, world: int, *, directory: Path, override: str | None = None) -> Machine:
    """What a plan's `cluster` statement names.

    Args:
        use: the statement.
        world: ranks of the plan's mesh. A single host has as many devices as ranks, where it does not say.
        directory: of the plan, from which its profile file is found.
        override: instead of the plan's device another one: a name of the catalogue, a device file (`NAME.toml`, with
            its profile `NAME.json.gz` beside it, as `legoai calibrate` writes them), or a profile (`NAME.json.gz`)
            of the plan's own device.

    Raises:
        ProfileError: a profile that is not there or not readable.
        CatalogueError: a device that is not known or not complete.
    """
    cluster = cluster_of(use, world, directory=directory, override=override)
    found = _profile_of(use, directory) if override is None else _overriding_profile(override)
    return Machine(cluster=cluster, profile=found, network=network.network_of(cluster))


def cluster_of(use: ClusterUse, world: int, *, directory: Path, override: str | None = None) -> Cluster:
    """The cluster alone, of which no speed need be known. Arguments and errors are those of :func:`machine_of`."""
    if override is None or override.endswith(PROFILE_SUFFIX):
        own = _device_of(use, directory)
    else:
        own = load_profile(Path(override)) if override.endswith(".toml") else device(override)
    wires = fabric(use.fabric) if use.hosts > 1 and use.fabric is not None else None
    per_host = use.devices
    if per_host is None:
        per_host = own.devices_per_host
        if use.hosts == 1 and own.kind == "cpu":
            per_host = max(per_host, world)
    return Cluster(device=own, hosts=use.hosts, devices_per_host=per_host, fabric=wires)


def _device_of(use: ClusterUse, directory: Path) -> Device:
    if use.device != "profile":
        return device(use.device)
    assert use.profile is not None, "a finding of lint"
    return load_profile(directory / use.profile)


def _profile_of(use: ClusterUse, directory: Path) -> Profile:
    if use.device != "profile":
        return profile(use.device)
    assert use.profile is not None, "a finding of lint"
    return _beside(directory / use.profile)


def _beside(path: Path) -> Profile:
    """The profile beside a device file; where there is none, the shipped one of the device's name."""
    measured = path.with_suffix(PROFILE_SUFFIX)
    if measured.exists():
        return load(measured)
    name = load_profile(path).name
    if name in profile_names():
        return profile(name)
    raise ProfileError(
        f"{path.name} describes the device, but how fast it is stands in {measured.name} beside it, which is not "
        "there; `legoai calibrate` writes both"
    )


def _overriding_profile(override: str) -> Profile:
    if override.endswith(".toml"):
        return _beside(Path(override))
    return load(Path(override)) if override.endswith(PROFILE_SUFFIX) else profile(override)


@dataclass(slots=True, kw_only=True)
class Prices:
    """What operations take on a machine, each asked for once.

    Attributes:
        machine: where they run.
        known: costs that were given.
        gap: seconds between two kernels that are queued.
        copies: bytes per second between host and device by direction, and the model that says so.
    """

    machine: Machine
    known: dict[object, Cost] = field(default_factory=dict)
    seen: dict[object, tuple[Timed, Cost]] = field(default_factory=dict)
    """The same by the identity of what an operation has, with the operation, which keeps that alive."""
    gap: float = 0.0
    copies: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    host: Profile | None = None
    """Of the processor that computes what is in host memory; read when it is first asked for."""

    def __post_init__(self) -> None:
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
        key = _key(record)
        cost = self.known.get(key)
        if cost is None:
            cost = self.known[key] = self._cost(record)
        self.seen[same] = record, cost
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
        work = kernels.work_of(record)
        seconds, model = kernels.seconds_of(work, profile)
        return Cost(
            seconds=seconds + self.gap,
            resource="compute",
            model=model,
            beside=beside_collectives(work, profile),
            memory=memory_share(work.bytes, seconds, profile),
        )

    def _communication(self, record: Collective) -> tuple[float, str]:
        return network.estimate(record, self.machine.network, self.machine.profile)

    def _peer_copy(self, record: Collective) -> tuple[float, str]:
        """Over the link, by a copy engine; as a send where the profile does not say how fast that is."""
        share = self.machine.constant("peer_copy_share")
        if share is None:
            return self._communication(record)
        rate = share * self.machine.device.figure("link.bandwidth_bytes_per_second")
        return self.gap + record.bytes / rate, kernels.ROOFLINE

    def _on_host(self, record: HostKernel) -> Cost:
        """The time of an operator on the host: that of the catalogue's `cpu`, as no profile knows the device's own."""
        if self.host is None:
            self.host = self.machine.profile if self.machine.device.kind == "cpu" else profile("cpu")
        seconds, model = kernels.estimate(_on_device(record), self.host)
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


def _copy_rate(machine: Machine, direction: str) -> tuple[float, str]:
    """Bytes per second between host and device: measured, else the datasheet's of the link."""
    measured = machine.constant(f"{direction}_bytes_per_second")
    if measured is not None:
        return measured, kernels.MEASURED
    if machine.device.kind == "cpu":
        return float("inf"), "analytical"
    return machine.device.figure("host_link.bandwidth_bytes_per_second"), kernels.ROOFLINE


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
    if isinstance(record, Kernel | HostKernel):
        return (
            type(record), record.op, id(record.inputs), id(record.outputs), id(record.attributes), record.flops,
            record.bytes_read, record.bytes_written,
        )  # fmt: skip
    if isinstance(record, Collective):
        return record.kind, id(record.ranks), record.bytes
    return record.direction, record.bytes


def _key(record: Timed) -> object:
    if isinstance(record, Kernel | HostKernel):
        attributes = tuple(sorted((name, str(value)) for name, value in record.attributes.items()))
        return (
            type(record), record.op, record.inputs, record.outputs, record.flops, record.bytes_read,
            record.bytes_written, attributes,
        )  # fmt: skip
    if isinstance(record, Collective):
        return record.kind, record.ranks, record.bytes
    return record.direction, record.bytes
