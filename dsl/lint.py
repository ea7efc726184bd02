"""Lints a plan: reads it, resolves it and each of its variants, and runs every check."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.cascade import is_cause, without_effects
from legoai.dsl.diagnostics.codes.names import FactoryNotRun, ModelUnavailable, NoSuchPath
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend import suppress
from legoai.dsl.frontend.merge import Reads
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.rules import checks
from legoai.dsl.rules.hygiene import MalformedSuppression, UnusedLet, UnusedSuppression
from legoai.specs.directives.hole import Undecided
from legoai.specs.plan import Plan
from legoai.specs.record import Record, replace

if TYPE_CHECKING:
    from legoai.specs.models.manifest import Manifest

Announce = Callable[[str], None]


class Linted(Record):
    """What linting found: the diagnostics in order, the files that they speak of, and the plan where there is one."""

    diagnostics: tuple[Diagnostic, ...]
    files: Mapping[str, PlanFile]
    resolution: Resolution
    analysis: Analysis | None
    suppressed: tuple[Diagnostic, ...] = ()
    """Errors that the plan's own comments accept."""

    @property
    def plan(self) -> Plan | None:
        """The resolved plan; None where it could not be resolved."""
        return self.resolution.plan

    @property
    def has_errors(self) -> bool:
        """Whether any diagnostic is an error."""
        return any(item.severity == "error" for item in self.diagnostics)


def lint(
    text: str,
    name: str,
    *,
    directory: Path,
    settings: Mapping[str, str] | None = None,
    variant: str | None = None,
    announce: Announce | None = None,
    read: Reads | None = None,
    variants: bool = True,
    factories: bool = True,
) -> Linted:
    """Lint a plan's text. Never raises for any text.

    With ``variant`` only that variant is looked at; without, the plan itself and then, unless ``variants`` is false,
    each variant. ``announce`` is told before a model factory that the plan names is run, in a process of its own.
    Unless ``factories`` is true none is run, and what depends on such a model is not checked.
    """
    base = resolve(text, name, directory=directory, settings=settings, variant=variant, read=read)
    analysis, found = _examine(base, directory, announce, factories=factories)
    used = set(base.scope.used)
    files = dict(base.files)
    if variant is None and variants:
        for other in base.variants:
            resolution = resolve(text, name, directory=directory, settings=settings, variant=other, read=read)
            known = {(item.code, item.label.span, item.message) for item in found}
            for item in _examine(resolution, directory, announce, analysis, factories=factories)[1]:
                if (item.code, item.label.span, item.message) not in known:
                    found.append(replace(item, help=(*item.help, f"this is so in the variant `{other}`")))
            used |= resolution.scope.used
            files |= resolution.files
    causes = [item for item in found if is_cause(item)]
    found.extend(UnusedLet.find(base, used | _named_in(base, causes)))
    found.extend(MalformedSuppression.find(item for file in files.values() for item in suppress.malformed(file)))
    kept, _, unused = suppress.split(found, files.values())
    accepted = tuple(item for item in found if item.severity == "error" and item not in kept)
    kept.extend(UnusedSuppression.find(unused, muted=bool(causes)))
    return Linted(tuple(sorted(kept, key=lambda item: item.order)), files, base, analysis, accepted)


def _own_fix(item: Diagnostic, resolution: Resolution) -> Diagnostic:
    """The diagnostic without a fix that would write into the plan what only a setting or a variant says."""
    fix = item.fix
    if fix is None or fix.safe or (is_cause(item) and item.code != NoSuchPath.code):
        return item
    variant = resolution.variants.get(resolution.variant) if resolution.variant is not None else None
    inside = variant is not None and all(
        edit.span.file == variant.span.file and variant.span.start <= edit.span.start < variant.span.end
        for edit in fix.edits
    )
    if (resolution.variant is None or inside) and not resolution.scope.is_set:
        return item
    return replace(item, fix=None)


def _named_in(resolution: Resolution, causes: Sequence[Diagnostic]) -> set[str]:
    """The words of statements that could not be read, which may be uses of `let` names."""
    spans = [*resolution.damaged, *(item.span for item in resolution.file.statements)]
    wrong = [cause.label.span for cause in causes]
    texts = [
        resolution.files[span.file].text[span.start : span.end]
        for span in spans
        if any(span.file == cause.file and span.start <= cause.start < span.end for cause in wrong)
    ]
    return {word for text in texts if not text.startswith("let ") for word in re.findall(r"\w+", text)}


def _examine(
    resolution: Resolution,
    directory: Path,
    announce: Announce | None,
    base: Analysis | None = None,
    *,
    factories: bool,
) -> tuple[Analysis | None, list[Diagnostic]]:
    """The checks' diagnostics on one resolution, after those of reading it.

    ``base`` is the analysis of the plan whose variant this is, which mostly is of the same model.
    """
    found = list(resolution.diagnostics)
    plan = resolution.plan
    if plan is None or resolution.unreadable:
        # Diagnostics about what a plan lacks would speak of what could not be read.
        return None, found
    same_model = base is not None and base.manifest is not None and base.plan.model == plan.model
    manifest: Manifest | Diagnostic | None
    if base is not None and same_model:
        manifest = base.manifest
    elif plan.model.family == "python" and not factories:
        manifest = FactoryNotRun.at(
            plan.model.place("target") or resolution.start,
            "the factory is not run, so nothing that depends on the model is checked",
            label="not run",
            help=["without `--no-factories` it runs, in a process of its own"],
        )
    else:
        manifest = _manifest(plan, resolution, directory, announce)
    if isinstance(manifest, Diagnostic):
        found.append(manifest)
        manifest = None
    analysis = Analysis(plan, manifest, directory, resolution=resolution)
    found.extend(check(analysis))
    found = [_own_fix(item, resolution) for item in found]
    remaining = suppress.split(found, resolution.files.values())[0]
    accepted = [item for item in found if item not in remaining]
    return analysis, without_effects(found, [item.span for item in resolution.statements], accepted)


def check(analysis: Analysis) -> Iterator[Diagnostic]:
    """What every rule that looks at a resolved plan reports; suppressions in the plan's text are not applied."""
    for rule in checks():
        try:
            # A generator that meets a hole has already given what it found before.
            yield from rule.check(analysis)
        except Undecided:
            continue


def _manifest(
    plan: Plan, resolution: Resolution, directory: Path, announce: Announce | None
) -> Manifest | Diagnostic | None:
    from legoai.specs.directives.model import FOREIGN
    from legoai.specs.models.configs import ConfigError
    from legoai.specs.models.load import load_manifest
    from legoai.specs.models.manifest import ManifestError

    model = plan.model
    try:
        if model.family in FOREIGN and model.target is None:
            return None
        return load_manifest(model.source(), base_directory=directory, announce=announce)
    except ConfigError:
        # The check of the model statement says what is wrong with its dimensions.
        return None
    except ManifestError as error:
        return ModelUnavailable.at(
            model.place("target") or resolution.start, error.message, label="cannot be looked at",
            help=[error.detail] if error.detail else [],
        )  # fmt: skip
    except Undecided:
        return None
