"""`cluster`: rules about devices and fabrics without measured figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.devices.cluster import fabrics_for
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.hole import Hole, Undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """A part of a cluster without figures.

    Attributes:
        option: of the `cluster` statement, that names it.
        fault: what is missing.
        help: how to get figures.
    """

    option: str
    fault: str
    help: tuple[str, ...]


class UnmeasuredCluster(Check):
    """Devices, or a fabric between hosts, without measured figures.

    A device file describes a device; how long kernels and collectives take on it is in its profile, which has the
    file's name with `.json.gz` and stands beside it; without one, the catalogue's device of the file's `name` stands
    in. Of `loopback`, by which several launchers on one machine are seen as hosts, no speed is known. A plan without
    figures of its devices or of the fabric between its hosts, or with a profile that cannot be read, can be lowered and
    run. It is not costed: `require` lines are not tested, and holes are not filled. `legoai calibrate -o our_gpu.toml`,
    on a machine with the device, measures it and writes `our_gpu.toml` and `our_gpu.json.gz`. `legoai cost`, `check`,
    `solve` and `graph` can be given other devices by `--profile DEVICE`, and give LP315 without; a fabric they take
    from the plan alone.

    ## Example
    ```
    cluster h100_sxm(hosts = 4, fabric = loopback)
    ```

    ## Use instead
    ```
    cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
    ```
    """

    code = "LP314"
    slug = "unmeasured-cluster"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for part in (unmeasured_device(analysis), unmeasured_fabric(analysis)):
            if part is not None:
                yield self._unmeasured(analysis, part)

    def _unmeasured(self, analysis: Analysis, part: Unmeasured) -> Diagnostic:
        plan, resolution = analysis.plan, analysis.resolution
        asked = () if resolution is None else resolution.scope.asked.values()
        holes = [Label(hole.span, "cannot be filled") for hole, _ in asked if hole.answer is None][:1]
        others = [Label(item.origin.written, "is not tested") for item in plan.require[:1]]
        if plan.objective is not None:
            others.append(Label(plan.objective.origin.written, "cannot be solved for"))
        rest = "can be lowered and run, and not costed" if not holes else "can be neither costed nor solved"
        return self.at(
            analysis.span_of(plan.cluster, part.option), f"{part.fault}: the plan {rest}", label="not measured",
            others=[*others, *holes], help=part.help,
        )  # fmt: skip


class ProfileOfAnotherDevice(Check):
    """A profile beside a device file that was measured on a device of another name.

    `legoai calibrate -o our_gpu.toml` writes the device's name into both files. Where they differ, the profile was
    copied or confused: times and memory are predicted by the other device's figures, and capacity and peak rates by
    the file's own.
    """

    code = "LP319"
    slug = "profile-of-another-device"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use, device = analysis.plan.cluster, analysis.device
        if use.device != "profile" or device is None or not isinstance(use.profile, str):
            return
        from legoai.specs.profile_file import profile_owner

        owner = None if fault_of_profile(analysis) is not None else profile_owner(analysis.directory / use.profile)
        if owner is None or owner == device.name:
            return
        yield self.at(
            analysis.span_of(use, "profile"),
            f"the device is `{device.name}`, and the profile beside its file is of `{owner}`",
            label="predicted by another device's figures",
            help=[
                f"`legoai calibrate -o {use.profile}`, on a machine with the device, measures it and writes both files"
            ],
        )


class FiguresOfUnmeasuredCluster(Rule):
    """A command that needs figures of devices, or of a fabric, of which none were measured.

    `legoai cost`, `check` and `solve`, pictures of a step or a pipeline by `legoai graph`, and `legoai.estimate` and
    `legoai.solve` simulate a step. Where the plan names a device file, this takes the device's profile, which
    `legoai calibrate -o our_gpu.toml` measures and writes beside the file; `--profile DEVICE` names other devices for
    one command. Where the plan has several hosts, it takes the speed of the fabric between them, which is known of all
    fabrics but `loopback`. `legoai lint` does not give this error. It warns of such a plan by LP314, as it can be
    lowered and run.
    """

    code = "LP315"
    slug = "figures-of-unmeasured-cluster"


def unmeasured_device(analysis: Analysis) -> Unmeasured | None:
    """The device file of a plan, where its profile gives no figures; None where it does, or there is no such file."""
    fault = fault_of_profile(analysis)
    return None if fault is None else file_without_figures(analysis.plan.cluster, fault)


def file_without_figures(use: ClusterUse, fault: str) -> Unmeasured:
    """The device file of a plan, whose profile has a fault."""
    return Unmeasured(
        option="profile",
        fault=fault,
        help=(
            f"`legoai calibrate -o {use.profile}`, on a machine with the device, measures it and writes both files",
            "`--profile DEVICE` makes `cost`, `check`, `solve` and `graph` simulate other devices",
        ),
    )


def unmeasured_fabric(analysis: Analysis) -> Unmeasured | None:
    """The fabric between a plan's hosts, where nothing is known of its speed; None where it is, or nothing is sent.

    Of holes, a value of their domains: candidates with it could not be compared with others.

    Raises:
        Undecided: the device, or a value without a domain, is not decided yet.
    """
    from legoai.specs.cluster import fabric

    use, device = analysis.plan.cluster, analysis.device
    hosts = max(use.hosts.domain) if isinstance(use.hosts, Hole) and use.hosts.domain else use.hosts
    fabrics = use.fabric.domain if isinstance(use.fabric, Hole) and use.fabric.domain else (use.fabric,)
    name = next((one for one in fabrics if one is not None and not fabric(one).has_figures), None)
    if hosts == 1 or name is None:
        return None
    known = [] if device is None else [f"`{item.name}`" for item in fabrics_for(device) if item.has_figures]
    return Unmeasured(
        option="fabric",
        fault=f"nothing is known of the speed of the fabric `{name}`",
        help=(f"figures are known of {', '.join(known)}",) if known else (),
    )


def fault_of_profile(analysis: Analysis) -> str | None:
    """Why the profile beside a plan's device file gives no figures; None where it does, or there is no such file."""
    use, device = analysis.plan.cluster, analysis.device
    if use.device != "profile" or device is None or not isinstance(use.profile, str):
        return None
    from legoai.specs.profile_file import profile_fault

    try:
        ranks = analysis.plan.mesh.world_size
        devices = min(use.devices_for(device, ranks), ranks)
    except Undecided:
        devices = 1
    return profile_fault(analysis.directory / use.profile, device.name, devices=devices)
