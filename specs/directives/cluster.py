"""`cluster`: the machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Integer, Listed, Text

if TYPE_CHECKING:
    from legoai.specs.cluster import Device


def device_choices() -> tuple[str, ...]:
    """Return every name allowed after `cluster`: the catalogue's devices, and `profile` for a file of one's own."""
    from legoai.specs.cluster import device_names

    return (*device_names(), "profile")


def fabric_choices() -> tuple[str, ...]:
    """The fabrics of the catalogue."""
    from legoai.specs.cluster import fabric_names

    return fabric_names()


class ClusterUse(Directive):
    """The cluster: a device of the catalogue or a profile file, the number of hosts, and the fabric between them.

    `cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)`, `cluster profile("our_gpu.toml", hosts = 2, fabric =
    roce_400)`, `cluster cpu(devices = 4)`.
    """

    keyword: ClassVar[str] = "cluster"
    subject: ClassVar[str | None] = "device"
    subject_holds_options: ClassVar[bool] = True

    device: str = option(Listed(device_choices, "a device"), doc="A device of the catalogue, or `profile`.")
    profile: str | None = option(
        Text("a quoted file name"), doc="The profile file, where the device is `profile`.", default=None
    )
    hosts: int = option(Integer(minimum=1), doc="Number of hosts.", default=1)
    devices: int | None = option(
        Integer(minimum=1), doc="Devices per host; by default what the device's usual host has.", default=None
    )
    fabric: str | None = option(
        Listed(fabric_choices, "a fabric"),
        doc="The network between hosts; needed where there are several.",
        default=None,
    )

    def described(self, directory: Path) -> Device | None:
        """The device; None where its profile, a file in ``directory``, cannot be read."""
        from legoai.specs.cluster import CatalogueError, device

        try:
            if self.device == "profile":
                from legoai.specs.device_file import load_device  # imports pydantic

                return load_device(directory / self.profile) if isinstance(self.profile, str) else None
            return device(self.device)
        except CatalogueError:
            return None

    @property
    def unmeasured_fabric(self) -> str | None:
        """The fabric between several hosts of whose speed nothing is known; None where there is none, or it is known.

        Raises:
            Undecided: the hosts or the fabric are not decided yet.
        """
        from legoai.specs.cluster import fabric

        if self.hosts == 1 or self.fabric is None or fabric(self.fabric).has_figures:
            return None
        return self.fabric

    def devices_per_host(self, directory: Path) -> int | None:
        """Devices in one host; None where neither the plan nor the device states it."""
        if self.devices is not None:
            return self.devices
        found = self.described(directory)
        return None if found is None else found.devices_per_host

    def number_of_devices(self, directory: Path) -> int | None:
        """Devices in all hosts; None where neither the plan nor the device states how many a host has.

        Raises:
            Undecided: the device, the hosts or their devices are a hole.
        """
        per_host = self.devices_per_host(directory)
        return None if per_host is None else self.hosts * per_host

    def devices_for(self, device: Device, ranks: int) -> int:
        """Devices in one host of ``device`` for some ranks; a single CPU host has as many as they need."""
        if self.devices is not None:
            return self.devices
        usual = device.devices_per_host
        return max(usual, ranks) if self.hosts == 1 and device.kind == "cpu" else usual
