"""Cache key of what is captured of a plan: its program, and the state of a model that is not built in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from legoai.cost.replay.key import Variation, variation_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.profile import ProfileKey, digest_of
from legoai.lowering.program import Program
from legoai.specs.cluster import Device
from legoai.specs.directives.model import FOREIGN
from legoai.specs.plan import Plan

if TYPE_CHECKING:
    from legoai.cost.simulated.device import Kind


def variation_of_plan(program: Program, analysis: Analysis, *, rank: int, kind: Kind, gpu: Device) -> Variation | None:
    """Return the cache key of what is captured of a plan; None where its program does not determine that.

    Args:
        program: what the plan was lowered to.
        analysis: of the plan.
        rank: global rank that is simulated.
        kind: of device, which decides the kernels.
        gpu: the plan's device.
    """
    plan, manifest, state = analysis.plan, analysis.manifest, state_of_model(analysis)
    assert manifest is not None
    if state is None:
        return None
    return variation_of(
        program.text,
        program.block_classes,
        manifest.block_lists,
        world=plan.mesh.world_size,
        rank=rank,
        kind=kind,
        gpu=gpu,
        measured=of_measured(plan, kind),
        ahead=program.look_ahead,
        model=state,
    )


def state_of_model(analysis: Analysis) -> str | None:
    """Return the state of a model's code and files, which its program only names; empty for a built-in one.

    None where it is not known, as without a cache of manifests: then nothing of the plan can be kept.
    """
    if analysis.plan.model.family not in FOREIGN:
        return ""
    return None if analysis.manifest is None else analysis.manifest.state or None


def may_keep(analysis: Analysis) -> bool:
    """Whether what this process, or one that it forks, captures of a plan is that of its model's state.

    Python imports a module once: in a process that goes on after an edit, a factory's modules are what they were. To be
    asked before a capture, which imports them.
    """
    source, state = analysis.plan.model.source(), state_of_model(analysis)
    if source.kind != "python":
        return state is not None
    package = source.target.partition(":")[0].partition(".")[0]
    first = _imported.setdefault((package, analysis.directory), state)
    return state is not None and first == state


_imported: Final[dict[tuple[str, Path], str | None]] = {}
"""State of the model for which this process has imported a factory's package, by the plan's folder."""


def of_measured(plan: Plan, kind: Kind) -> str:
    """Return the digest of the profile that a run of the plan measured; empty where its passes read none."""
    if plan.comm is None or plan.comm.profile != "measured":
        return ""
    return digest_of(ProfileKey.of_plan(plan, device=kind))
