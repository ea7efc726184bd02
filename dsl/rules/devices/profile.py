"""`cluster profile`: rules about a device file without the profile that `legoai calibrate` writes beside it."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.rules.base import Check
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.hole import Undecided


class DeviceWithoutProfile(Check):
    """A device file without measured figures.

    The file describes a device; how long kernels and collectives take on it is in its profile, which has the file's
    name with `.json.gz` and stands beside it; without one, the catalogue's device of the file's `name` stands in. A
    plan with neither, or with a profile that cannot be read, can be lowered and run. It is not costed: `require` lines
    are not tested, and holes are not filled. `legoai calibrate -o our_gpu.toml`, on a machine with the device, measures
    it and writes `our_gpu.toml` and `our_gpu.json.gz`. `legoai cost`, `check`, `solve` and `graph` can be given other
    devices by `--profile DEVICE`, and give LP315 without.
    """

    code = "LP314"
    slug = "device-without-profile"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use, fault = analysis.plan.cluster, fault_of_profile(analysis)
        if fault is None:
            return
        plan, resolution = analysis.plan, analysis.resolution
        asked = () if resolution is None else resolution.scope.asked.values()
        holes = [Label(hole.span, "cannot be filled") for hole, _ in asked if hole.answer is None][:1]
        others = [Label(item.origin.written, "is not tested") for item in plan.require[:1]]
        if plan.objective is not None:
            others.append(Label(plan.objective.origin.written, "cannot be solved for"))
        rest = "can be lowered and run, and not costed" if not holes else "can be neither costed nor solved"
        yield self.at(
            analysis.span_of(use, "profile"), f"{fault}: the plan {rest}", label="not measured",
            others=[*others, *holes], help=cures(use),
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


class FiguresWithoutProfile(Rule):
    """A command that needs figures of devices of which none were measured.

    `legoai cost`, `check` and `solve`, pictures of a step or a pipeline by `legoai graph`, and `legoai.estimate` and
    `legoai.solve` simulate a step. Where the plan names a device file, this takes the device's profile, which
    `legoai calibrate -o our_gpu.toml` measures and writes beside the file; `--profile DEVICE` names other devices for
    one command. `legoai lint` does not give this error. It warns of such a plan by LP314, as it can be lowered and run.
    """

    code = "LP315"
    slug = "figures-without-profile"


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


def cures(use: ClusterUse) -> list[str]:
    """Help for a plan whose device file has no profile."""
    return [
        f"`legoai calibrate -o {use.profile}`, on a machine with the device, measures it and writes both files",
        "`--profile DEVICE` makes `cost`, `check`, `solve` and `graph` simulate other devices",
    ]
