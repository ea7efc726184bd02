"""Machines: the cluster that a plan runs on, with the measured speed of its devices and networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from legoai.cost.machine.collective_time import Network, network_of
from legoai.cost.machine.contention import slowdown_by_collective
from legoai.cost.network.topology import World
from legoai.cost.profiles import Profile, ProfileError, load, profile, profile_names
from legoai.cost.timing.timeline import Host, Resource, call_constant
from legoai.cost.trace.records import CALLS, Call
from legoai.specs.cluster import (
    PROFILE_SUFFIX,
    CatalogueError,
    Cluster,
    Device,
    device,
    fabric,
    profile_path,
)
from legoai.specs.device_file import load_device
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.profile_file import profile_fault


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """A cluster, and its measured speed.

    Attributes:
        cluster: the hosts, their devices, and the fabric between them.
        profile: of the device.
        network: of the cluster.
        expandable_segments: whether torch's allocator uses expandable segments on its devices.
        world: ranks of the program that runs there; without it, a collective is that of its own group alone.
    """

    cluster: Cluster
    profile: Profile
    network: Network
    expandable_segments: bool = False
    world: World | None = None

    @property
    def device(self) -> Device:
        """One of its devices."""
        return self.cluster.device

    def constant(self, name: str) -> float | None:
        """A constant of the profile; None where it states none."""
        found = self.profile.constants.get(name)
        return None if found is None else found.value

    def calls(self) -> Mapping[Call, float]:
        """Seconds of the calls that the host makes beside issuing operations, as far as the profile states them."""
        return {call: seconds for call in CALLS if (seconds := self.constant(call_constant(call))) is not None}

    def host(self) -> Host:
        """Times of launching operations here, and the slowdown of computation by communication.

        On a cpu the host computes itself. The measured time of a kernel includes that of its dispatch; the simulator
        runs both concurrently, so that the longer one counts, and not both. Calls add to the kernels' times there.
        """
        return Host(
            dispatch_seconds=self.constant("dispatch_seconds") or 0.0,
            python_seconds=self.constant("python_seconds"),
            function_seconds=self.constant("function_seconds"),
            recompute_seconds=self.constant("recompute_seconds"),
            policy_seconds=self.constant("policy_seconds"),
            policy_recompute_seconds=self.constant("policy_recompute_seconds"),
            calls={} if self.device.kind == "cpu" else self.calls(),
            compute_slowdown=max(1.0, self.constant("compute_slowdown") or 1.0),
        )

    def slowdown(self, link: Resource) -> float:
        """`Cost.slowdown` of a collective on a link."""
        fabric = self.cluster.fabric
        return slowdown_by_collective(
            self.profile, None if fabric is None or link == "intra_host" else fabric.collective_channels
        )

    def peak(self, dtype: str, otherwise: str = "") -> tuple[float, str]:
        """Floating-point operations per second of dense products of a dtype, and where the figure is from.

        The datasheet's where it has one, whatever runs were measured; else the most that the profile's times allow.

        Args:
            dtype: the plan's name of it.
            otherwise: the dtype whose rate is returned where there is none for the first.

        Raises:
            ProfileError: neither the device's datasheet nor its profile has a rate for the dtype.
        """
        try:
            return self.device.peak(dtype), f"datasheet of {self.device.name}"
        except CatalogueError:
            model = self.profile.products.get(dtype)
            if model is None and otherwise not in ("", dtype):
                return self.peak(otherwise)
            if model is None:
                raise ProfileError(f"neither the catalogue nor the profile has a rate for {dtype}") from None
            return model.peak(dtype), f"profile of {self.profile.name}"


def machine_of(use: ClusterUse, world: int, *, directory: Path, override: str | None = None) -> Machine:
    """Return the machine that a plan's `cluster` statement names.

    Args:
        use: the statement.
        world: ranks of the plan's mesh. A single host of CPUs without a stated number of them has one for each rank.
        directory: of the plan, from which its profile file is found.
        override: instead of the plan's device another one: a name of the catalogue, a device file (`NAME.toml`, with
            its profile `NAME.json.gz` beside it, as `legoai calibrate` writes them), or a profile (`NAME.json.gz`)
            of the plan's own device. A host has as many of them as of the plan's.

    Raises:
        ProfileError: a profile is missing or not readable.
        CatalogueError: a device is unknown or incomplete.
    """
    cluster = cluster_of(use, world, directory=directory, override=override)
    found = profile_of(use, directory) if override is None else _overriding_profile(override)
    return Machine(cluster=cluster, profile=found, network=network_of(cluster, profile=found))


def cluster_of(use: ClusterUse, world: int, *, directory: Path, override: str | None = None) -> Cluster:
    """Return the cluster only, without a profile. Arguments and errors are those of :func:`machine_of`."""
    own = _device_of(use, directory)
    per_host = use.devices_for(own, world)
    if override is not None and not override.endswith(PROFILE_SUFFIX):
        own = load_device(Path(override)) if override.endswith(".toml") else device(override)
    wires = fabric(use.fabric) if use.hosts > 1 and use.fabric is not None else None
    return Cluster(device=own, hosts=use.hosts, devices_per_host=per_host, fabric=wires)


def _device_of(use: ClusterUse, directory: Path) -> Device:
    if use.device != "profile":
        return device(use.device)
    assert use.profile is not None, "a diagnostic of lint"
    return load_device(directory / use.profile)


def profile_of(use: ClusterUse, directory: Path) -> Profile:
    """Return the profile of the devices that a `cluster` statement names. Errors are those of :func:`machine_of`."""
    if use.device != "profile":
        return profile(use.device)
    assert use.profile is not None, "a diagnostic of lint"
    return _profile_of_file(directory / use.profile)


def _profile_of_file(path: Path) -> Profile:
    """The profile beside a device file; where there is none, the shipped one of the device's name."""
    measured = profile_path(path)
    if measured.exists():
        return load(measured)
    name = load_device(path).name
    if name in profile_names():
        return profile(name)
    raise ProfileError(
        f"{profile_fault(path, name)}; `legoai calibrate -o {path.name}`, on a machine with the device, writes both"
    )


def _overriding_profile(override: str) -> Profile:
    if override.endswith(".toml"):
        return _profile_of_file(Path(override))
    return load(Path(override)) if override.endswith(PROFILE_SUFFIX) else profile(override)
