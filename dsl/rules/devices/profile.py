"""`cluster profile`: rules about a device file without the profile that `legoai calibrate` writes beside it.

A plan's command line may name other devices, and a candidate of `legoai solve` has the devices of its plan: these rules
are no checks of every resolved plan, but of the plan that a command reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.specs.span import Span


class DeviceWithoutProfile(Rule):
    """A device file without measured figures.

    The file describes a device; how long kernels and collectives take on it is in its profile, which has the file's
    name with `.json.gz` and which `legoai calibrate` writes beside it. Without one, and where the catalogue has no
    device of the file's `name`, the plan can be lowered and run, and `legoai cost`, `check` and `solve` need
    `--profile DEVICE`.
    """

    code = "LP314"
    slug = "device-without-profile"
    severity = "warning"


class FiguresWithoutProfile(Rule):
    """A plan that asks for figures of a device of which none were measured.

    `require`, `minimize`, `maximize` and holes without an answer need a simulated step, which needs the profile that
    `legoai calibrate` writes beside the device file. `--profile DEVICE` names other devices for one command.
    """

    code = "LP315"
    slug = "figures-without-profile"


def without_figures(analysis: Analysis) -> Iterator[Diagnostic]:
    """Yield the diagnostic of a plan whose devices have no profile: an error where the plan asks for figures."""
    found = _lacking(analysis)
    if found is None:
        return
    span, message = found
    asking = _asking(analysis)
    if asking is None:
        yield DeviceWithoutProfile.at(
            span, f"{message}: the plan can be lowered and run, and not costed", label="not measured", help=_HELP
        )
    else:
        yield FiguresWithoutProfile.at(span, message, label="not measured", others=[asking], help=_HELP)


def cannot_be_costed(analysis: Analysis) -> Diagnostic | None:
    """Return the error of costing a plan whose devices have no profile; None where they have one."""
    found = _lacking(analysis)
    return None if found is None else FiguresWithoutProfile.at(*found, label="not measured", help=_HELP)


_HELP = (
    "`legoai calibrate` measures the device, and writes both",
    "`--profile DEVICE` costs the plan on other devices",
)


def _lacking(analysis: Analysis) -> tuple[Span, str] | None:
    """The place of a device file without a profile, and a message."""
    from legoai.specs.cluster import device_names, profile_path

    use, device = analysis.plan.cluster, analysis.device
    if use.device != "profile" or device is None or not isinstance(use.profile, str):
        return None
    beside = profile_path(analysis.directory / use.profile)
    if beside.exists() or device.name in device_names():
        return None
    return analysis.span_of(
        use, "profile"
    ), f"the profile of `{device.name}`, {beside.name}, is missing beside its file"


def _asking(analysis: Analysis) -> Label | None:
    """The first place that needs figures."""
    plan, resolution = analysis.plan, analysis.resolution
    if plan.require:
        return Label(plan.require[0].origin.written, "needs its figures")
    if plan.objective is not None:
        return Label(plan.objective.origin.written, "needs its figures")
    holes = () if resolution is None else (hole for hole, _ in resolution.scope.asked.values() if hole.answer is None)
    return next((Label(hole.span, "is filled by its figures") for hole in holes), None)
