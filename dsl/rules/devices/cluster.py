"""`cluster`: rules about the machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import written
from legoai.dsl.diagnostics.codes.names import WrongProfile
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.compile import Inductor

if TYPE_CHECKING:
    from legoai.specs.cluster import Device, Fabric


class ProfileIsReadable(WrongProfile, Check):
    """The device profile that the plan names is a file that can be read, and its figures are those of a device.

    Figures have ranges far wider than what machines have, such as 1 MB/s to 1,000 EB/s for a bandwidth: outside of them
    are slips, such as GB/s where bytes per second are meant.

    ## Example
    ```
    cluster profile(hosts = 4, fabric = infiniband_ndr)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    ```
    """

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use = analysis.plan.cluster
        if use.device != "profile":
            return
        from legoai.specs.cluster import CatalogueError
        from legoai.specs.device_file import load_device  # imports pydantic

        if use.profile is None:
            yield self.at(
                analysis.span_of(use, "device"),
                "`profile` needs the profile's file in quotes",
                label="no file is named",
                help=['write `profile("our_gpu.toml", …)`, or name a device of the catalogue'],
            )
            return
        try:
            load_device(analysis.directory / use.profile)
        except CatalogueError as error:
            yield self.at(
                analysis.span_of(use, "profile"),
                f"the device profile cannot be used: {error.field}: {error.message}",
                label="this file",
                help=[f"legal are {', '.join(f'`{item}`' for item in error.legal)}"] if error.legal else [],
            )


class UnusedProfile(Check):
    """A profile file beside a device of the catalogue, which is not read.

    ## Example
    ```
    cluster h100_sxm(profile = "our_gpu.toml", hosts = 4, fabric = infiniband_ndr)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    ```

    Or let the file decide: `cluster profile("our_gpu.toml", hosts = 4, fabric = infiniband_ndr)`.
    """

    code = "LP305"
    slug = "unused-profile"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use = analysis.plan.cluster
        if use.device != "profile" and use.profile is not None:
            yield self.at(
                analysis.span_of(use, "profile"),
                f"the file is not read, since the device is `{use.device}` of the catalogue",
                label="has no effect",
                others=[Label(analysis.span_of(use, "device"), "decides the device")],
                help=[f'write `profile("{use.profile}", …)` to use the file, or leave it out'],
            )


class MissingFabric(Check):
    """Several hosts without a network between them.

    Collectives between hosts go over the fabric, and its bandwidth decides which mesh is fast.

    ## Example
    ```
    cluster h100_sxm(hosts = 4)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    ```
    """

    code = "LP302"
    slug = "missing-fabric"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        from legoai.specs.cluster import fabric_names

        use = analysis.plan.cluster
        if use.hosts > 1 and use.fabric is None:
            yield self.at(
                analysis.span_of(use, "hosts"),
                f"{use.hosts} hosts need a fabric between them",
                label="more than one host",
                help=[f"add `fabric = …`: {', '.join(f'`{name}`' for name in fabric_names())}"],
            )


class UnusedFabric(Check):
    """A fabric with a single host, over which nothing is sent.

    ## Example
    ```
    cluster h100_sxm(hosts = 1, fabric = infiniband_ndr)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 1)
    ```
    """

    code = "LP303"
    slug = "unused-fabric"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use = analysis.plan.cluster
        if use.hosts == 1 and use.fabric is not None:
            others = [Label(analysis.span_of(use, "hosts"), "one host")] if written(use, "hosts") else []
            yield self.at(
                analysis.span_of(use, "fabric"),
                "one host sends nothing over a fabric",
                label="has no effect",
                others=others,
                help=["leave the fabric out, or give the number of hosts"],
            )


class FabricOfOtherDevice(Check):
    """A fabric that no host with this device has.

    A cloud's own fabric belongs to its hosts and their devices; and no adapter sends faster than the device's link to
    the host.

    ## Example
    ```
    cluster a100_sxm80(hosts = 4, fabric = efa_p5)
    ```

    ## Use instead
    ```
    cluster a100_sxm80(hosts = 4, fabric = efa_p4d)
    ```
    """

    code = "LP312"
    slug = "fabric-of-other-device"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        from legoai.specs.cluster import fabric

        use, device = analysis.plan.cluster, analysis.device
        if device is None or use.fabric is None or use.hosts == 1 or use.device == "profile":
            return
        found = fabric(use.fabric)
        if why := _unlike(found, device):
            yield self.at(
                analysis.span_of(use, "fabric"),
                f"hosts of `{device.name}` have no `{found.name}`: {why}",
                label="of other hosts",
                others=[Label(analysis.span_of(use, "device"), f"`{device.name}`")],
                help=[f"fabrics for `{device.name}` are {', '.join(f'`{item.name}`' for item in fabrics_for(device))}"],
            )


def fabrics_for(device: Device) -> Iterator[Fabric]:
    """The fabrics of the catalogue that hosts with the device may have."""
    from legoai.specs.cluster import fabric, fabric_names

    return (found for found in map(fabric, fabric_names()) if not _unlike(found, device))


def _unlike(fabric: Fabric, device: Device) -> str | None:
    """Why hosts with the device do not have the fabric; None where they may."""
    if fabric.devices and device.name not in fabric.devices:
        return f"it belongs to hosts of {' and '.join(f'`{name}`' for name in fabric.devices)}"
    link, rate = device.host_link, fabric.bandwidth_bytes_per_second
    if link is not None and rate is not None and rate > link.bandwidth_bytes_per_second:
        return (
            f"its {rate / 1e9:g} GB/s are more than the {link.bandwidth_bytes_per_second / 1e9:g} GB/s of {link.kind}"
        )
    return None


class UnknownProcessor(Check):
    """Modules compiled by inductor for a GPU whose file does not tell what inductor asks for.

    Inductor decides by the compute capability and the number of multiprocessors how it divides long reductions. A run
    asks the GPU itself, and `legoai cost` the device's file: without `processor.compute_capability`, or with one of
    which the catalogue has no GPU and no `processor.multiprocessors`, the plan cannot be costed. The devices of the
    catalogue state both, and so do files that `legoai calibrate` writes on the GPU.
    """

    code = "LP313"
    slug = "unknown-processor"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        from legoai.specs.processors import missing_for_inductor

        use, device = analysis.plan.cluster, analysis.device
        if device is None or device.kind != "cuda" or use.device != "profile":
            return
        compiled = [rule for rule in compiled_modules(analysis).values() if isinstance(rule.treatment, Inductor)]
        missing = missing_for_inductor(device) if compiled else None
        if missing is not None:
            yield self.at(
                analysis.span_of(use, "profile"),
                f"inductor asks for the {missing.replace('_', ' ')} of `{device.name}`, not stated or unknown: "
                "the plan cannot be costed",
                label="this file",
                others=[Label(analysis.rule_span(compiled[0]), "compiled by inductor")],
                help=[f"write `processor.{missing}` in it"],
            )


class TooManyDevices(Check):
    """More devices in a host than hosts with this device have.

    The catalogue's figures for traffic between devices hold inside one usual host. Where hosts are really
    larger, describe the device in a profile of your own, with its `devices_per_host`.

    ## Example
    ```
    cluster h100_sxm(hosts = 2, devices = 16, fabric = infiniband_ndr)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, devices = 8, fabric = infiniband_ndr)
    ```
    """

    code = "LP304"
    slug = "too-many-devices"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use, device = analysis.plan.cluster, analysis.device
        if device is None or device.kind == "cpu" or use.devices is None or use.devices <= device.devices_per_host:
            return
        total, usual = use.hosts * use.devices, device.devices_per_host
        help = [f"a profile of your own may state other hosts: `devices_per_host = {use.devices}`"]
        if total % usual == 0:
            help.insert(0, f"{total} devices are {total // usual} hosts of {usual}")
        yield self.at(
            analysis.span_of(use, "devices"),
            f"a host has {usual} device{'s' * (usual != 1)} of `{device.name}`, not {use.devices}",
            label=f"more than {usual}",
            help=help,
        )
