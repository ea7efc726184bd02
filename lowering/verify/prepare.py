"""Shrunken plan of a plan, with its program, prepared for a verification."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication.measured_profile import is_measured
from legoai.dsl.analysis.magnitudes.state import state_bytes
from legoai.dsl.analysis.model import synchronised_norms
from legoai.dsl.analysis.parallelism.graph import unshards_selectively
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.parsing import suppress
from legoai.dsl.lint import Linted, check
from legoai.lowering.program import LoweringError, Program, check_decided, lower, unavailable
from legoai.lowering.shrink import MAX_RANKS, Shrunken, shrink
from legoai.lowering.shrink_blocks import Blocks
from legoai.lowering.shrink_sizes import CannotShrinkError
from legoai.lowering.verify.memory_limit import dividing_limit
from legoai.lowering.verify.prepared import Prepared
from legoai.specs import record
from legoai.specs.models.manifests.cache import read_config
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest, ManifestError
from legoai.specs.units import format_bytes


class ShrunkenPlanError(Exception):
    """The shrunken plan violates rules that the original satisfies: an internal error.

    Attributes:
        diagnostics: of the shrunken plan.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        first = diagnostics[0]
        super().__init__(f"{first.label.span}: {first.code} {first.message}")
        self.diagnostics = diagnostics


def prepare(
    linted: Linted,
    *,
    directory: Path,
    ranks: int = MAX_RANKS,
    double: bool = True,
) -> Prepared:
    """Shrink a plan and lower the result.

    Args:
        linted: the plan, without errors.
        directory: the plan's.
        ranks: the most ranks to use.
        double: whether to compute in fp64, instead of in the plan's dtypes.

    Raises:
        LoweringError: the plan has holes, or something that cannot be lowered, or its model cannot be built, in its
            original or shrunken size.
        CannotShrinkError: the plan cannot be shrunk, or its model does not compute on CPUs.
        ShrunkenPlanError: the smaller plan has lint errors.
    """
    analysis = linted.analysis
    assert linted.plan is not None
    assert analysis is not None
    assert analysis.manifest is not None, "a model that cannot be looked at is a diagnostic"
    check_decided(analysis)
    if norms := synchronised_norms(analysis):
        raise CannotShrinkError(f"`{norms[0]}` of class `SyncBatchNorm` computes on GPUs alone, and verify on CPUs")
    config = None
    if linted.plan.model.family == "huggingface":
        assert linted.plan.model.target is not None
        try:
            config = read_config(directory / linted.plan.model.target)
        except ManifestError as error:
            raise LoweringError((unavailable(analysis, error),)) from error
    try:
        small = shrink(analysis, ranks=ranks, double=double, config=config)
    except ManifestError as error:
        raise LoweringError((unavailable(analysis, error),)) from error
    manifest = analysis.manifest
    if small.plan.model is not linted.plan.model:
        source = small.plan.model.source()
        if source.kind == "builtin":
            manifest = load_manifest(source, base_directory=directory)
        else:
            from legoai.specs.models.inspect import inspect_model

            # In this process, which is about to import torch anyway; only a factory's code would need a process of its
            # own.
            try:
                manifest = inspect_model(source, directory)
            except ManifestError as error:
                if source.kind == "huggingface":
                    raise CannotShrinkError(f"a smaller {source.target} is not accepted: {error.message}") from error
                raise LoweringError((unavailable(analysis, error),)) from error
            check_alike(small, manifest, analysis.manifest, source.target)
    smaller = Analysis(small.plan, manifest, directory, resolution=linted.resolution)
    found = errors_of(check(smaller))
    kept, _, _ = suppress.split(found, linted.files.values())
    if kept:
        raise ShrunkenPlanError(tuple(kept))
    program = lower(smaller)
    if unshards_selectively(smaller) and not is_measured(smaller):  # what decides by measured times is not known yet
        small, program = _within_memory(small, program, smaller)
    return Prepared(shrunken=small, program=program, reads=manifest.reads, drawing=_drawing(manifest))


def _within_memory(small: Shrunken, program: Program, analysis: Analysis) -> tuple[Shrunken, Program]:
    """Lower the limit of memory so that some units stay unsharded and others do not, where there is such a limit."""
    state = state_bytes(analysis)
    assert state is not None, "the model could be inspected"
    limit = dividing_limit(program, small.plan.mesh.world_size, least=state.total)
    if limit is None:
        return small, program
    [requirement] = small.plan.require
    plan = record.replace(small.plan, require=(record.replace(requirement, bound=limit),))
    change = f"require: peak_memory <= {format_bytes(limit)}, so that some units stay unsharded and others do not"
    small = replace(small, plan=plan, changes=(*small.changes, change))
    return small, lower(Analysis(plan, analysis.manifest, analysis.directory, resolution=analysis.resolution))


def check_alike(small: Shrunken, manifest: Manifest, original: Manifest, target: str) -> None:
    """Check that a smaller model runs, and that its blocks have the modules of those whose place they take.

    Raises:
        CannotShrinkError: a field that is not known here determines the model too.
    """
    if manifest.flow_error is not None and original.flow_error is None:
        raise CannotShrinkError(
            f"the forward of a smaller {target} fails, since some field of it is not known here: {manifest.flow_error}"
        )
    if small.blocks is None:
        return
    for new, old in enumerate(small.blocks.kept):
        before, after = (
            _parts(original, small.blocks, small.blocks.names[old]),
            _parts(manifest, small.blocks, str(new)),
        )
        if before != after:
            differing = min(before ^ after)
            raise CannotShrinkError(
                f"block {new} of a smaller {target} {'has' if differing in after else 'lacks'} {differing}, unlike "
                f"block {small.blocks.names[old]} whose place it takes: the field that decides this is not known here"
            )


def _parts(manifest: Manifest, blocks: Blocks, name: str) -> set[str]:
    """Return the relative paths of a block's modules, without numbers: there may be fewer experts."""
    prefix = f"{blocks.path}.{name}." if blocks.path else f"{name}."
    found = (path.removeprefix(prefix) for path in manifest.modules if path.startswith(prefix))
    return {".".join("*" if part.isdecimal() else part for part in path.split(".")) for path in found}


LARGEST_WHOLE_MODEL = 50_000_000
"""Most parameters of a model that is trained here without shrinking."""


class OtherProgramError(ValueError):
    """A program cannot be verified in place of a plan's own; the message gives the reason."""


def with_program(prepared: Prepared, file: Path, linted: Linted, *, ranks: int = MAX_RANKS) -> Prepared:
    """Replace the lowered program by one that a user has edited.

    Args:
        prepared: the shrunken plan with its own program.
        file: a program of the shrunken plan, or of the original plan if that is small, which is then not shrunk.
        linted: the plan.
        ranks: the most ranks to use.

    Raises:
        OtherProgramError: the program cannot be read, or belongs to another plan, or to one that is too large.
    """
    try:
        text = file.read_text(encoding="utf-8")
        digest = _digest_of(text)
    except (OSError, SyntaxError, ValueError) as error:
        raise OtherProgramError(f"{file} cannot be read as a program: {error}") from error
    shrunken, plan, analysis = prepared.shrunken, linted.plan, linted.analysis
    assert plan is not None
    assert analysis is not None
    assert analysis.manifest is not None
    if digest == shrunken.plan.digest:
        return replace(prepared, program=replace(prepared.program, text=text))
    if digest != plan.digest:
        raise OtherProgramError(f"{file} is the program of another plan: its PLAN_HASH is {digest or 'missing'}")
    if plan.mesh.world_size > ranks or analysis.manifest.parameter_count > LARGEST_WHOLE_MODEL:
        raise OtherProgramError(
            f"{file} is the program of the whole plan, which is too large to be run here: write that of the shrunken "
            "plan with --save-program, and edit it"
        )
    whole = Shrunken(plan=plan, changes=("the plan as it is",), blocks=None)
    program = replace(lower(analysis), text=text)
    manifest = analysis.manifest
    return Prepared(shrunken=whole, program=program, reads=manifest.reads, drawing=_drawing(manifest))


def _drawing(manifest: Manifest) -> tuple[str, ...]:
    return tuple(path for path, module in manifest.modules.items() if module.random)


def _digest_of(text: str) -> str:
    """Return the value of `PLAN_HASH`, or an empty string."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(it, ast.Name) and it.id == "PLAN_HASH" for it in node.targets
        ):
            return str(ast.literal_eval(node.value))
    return ""
