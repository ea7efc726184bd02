"""Shrunken plan of a plan, with its program, prepared for a verification."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend import suppress
from legoai.dsl.lint import Linted, check
from legoai.lowering.program import LoweringError, Program, check_decided, lower, unavailable
from legoai.lowering.shrink import MAX_RANKS, Shrunken, shrink
from legoai.specs.models.load import load_manifest
from legoai.specs.models.manifest import ManifestError
from legoai.specs.models.reads import Reads


class ShrunkenPlanError(Exception):
    """A smaller plan that breaks rules which the plan itself keeps: our mistake.

    Attributes:
        diagnostics: what the smaller plan breaks.
    """

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        first = diagnostics[0]
        super().__init__(f"{first.label.span}: {first.code} {first.message}")
        self.diagnostics = diagnostics


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan that is ready to be run here: a smaller one in its place, and that one's program."""

    shrunken: Shrunken
    program: Program
    reads: Reads | None
    """What the model takes."""


def prepare(
    linted: Linted,
    *,
    directory: Path,
    ranks: int = MAX_RANKS,
    double: bool = True,
) -> Prepared:
    """Shrink a plan and lower what comes of it.

    Args:
        linted: the plan, without errors.
        directory: the plan's.
        ranks: the most ranks to use.
        double: compute in fp64, instead of in the plan's dtypes.

    Raises:
        LoweringError: the plan has holes, or says what cannot be lowered, or its model cannot be built, as it stands or
            smaller.
        CannotShrinkError: no smaller plan can stand for it.
        ShrunkenPlanError: the smaller plan has lint errors.
    """
    analysis = linted.analysis
    assert linted.plan is not None
    assert analysis is not None
    assert analysis.manifest is not None, "a model that cannot be looked at is a diagnostic"
    check_decided(analysis)
    config = None
    if linted.plan.model.family == "huggingface":
        from legoai.specs.models.manifest_cache import read_config

        assert linted.plan.model.target is not None
        try:
            config = read_config(directory / linted.plan.model.target)
        except ManifestError as error:
            raise LoweringError((unavailable(analysis, error),)) from error
    small = shrink(analysis, ranks=ranks, double=double, config=config)
    manifest = analysis.manifest
    if small.plan.model is not linted.plan.model:
        source = small.plan.model.source()
        if source.kind == "builtin":
            manifest = load_manifest(source, base_directory=directory)
        else:
            from legoai.specs.models.inspect import inspect_model

            # In this process, which is about to import torch anyway; only a factory's code would need one of its own.
            try:
                manifest = inspect_model(source, directory)
            except ManifestError as error:
                raise LoweringError((unavailable(analysis, error),)) from error
    smaller = Analysis(small.plan, manifest, directory, resolution=linted.resolution)
    found = [item for item in check(smaller) if item.severity == "error"]
    kept, _, _ = suppress.split(found, linted.files.values())
    if kept:
        raise ShrunkenPlanError(tuple(kept))
    return Prepared(shrunken=small, program=lower(smaller), reads=manifest.reads)
