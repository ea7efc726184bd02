"""Lints a plan: reads it, resolves it and each of its variants, and runs every check."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.graph import traces
from legoai.dsl.diagnostics.cascade import Spans, is_cause, without_effects
from legoai.dsl.diagnostics.codes.names import FactoryNotRun, NoSuchPath, WrongDomain
from legoai.dsl.diagnostics.diagnostic import Diagnostic, errors_of
from legoai.dsl.frontend.parsing import suppress
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.dsl.frontend.statements.merge import Reads
from legoai.dsl.frontend.syntax import Let, PlanFile
from legoai.dsl.rules import checks, checks_for_errors
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.hygiene import EmptyVariant, MalformedSuppression, UnusedLet, UnusedSuppression
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.model import FOREIGN, Model
from legoai.specs.models.config_checks import ConfigError
from legoai.specs.models.manifests.manifest import Manifest, ManifestError
from legoai.specs.plan import Plan
from legoai.specs.record import Record, replace
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.dsl.formatting.unedited import Unedited

_MOST_TRIALS: Final = 60
"""Other answers that are tried at most, to tell whether a slip follows from one."""

Announce = Callable[[str], None]

Factories = bool | Callable[["Model"], bool]
"""Whether to run Python factories; or a predicate that is called for every model right before it is inspected."""


class Linted(Record):
    """Result of linting: the diagnostics in order, the files that they refer to, and the plan where there is one."""

    diagnostics: tuple[Diagnostic, ...]
    files: Mapping[str, PlanFile]
    resolution: Resolution
    analysis: Analysis | None
    suppressed: tuple[Diagnostic, ...] = ()
    """Errors that the plan's own comments accept."""
    unedited: Unedited | None = None
    """The plan's file as it was written, where the text that was linted has edits; of it are ``diagnostics``, and
    ``files`` hold it."""

    @property
    def plan(self) -> Plan | None:
        """The resolved plan; None where it could not be resolved."""
        return self.resolution.plan

    @property
    def has_errors(self) -> bool:
        """Whether any diagnostic is an error."""
        return bool(errors_of(self.diagnostics))


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
    factories: Factories = True,
    reopen: bool = False,
) -> Linted:
    """Lint a plan's text. Never raises for any text.

    With ``variant`` only that variant is linted; without, the plan itself and, unless ``variants`` is false, each
    variant. ``announce`` is called before a model factory of the plan runs, in a process of its own. Unless
    ``factories`` allows it, none runs, and checks that need such a model are skipped. With ``reopen`` the answers of
    the plan's own holes are forgotten, as `legoai solve` searches them again.
    """
    resolving = partial(resolve, text, name, directory=directory, settings=settings, read=read)
    base = _resolved(resolving, variant, reopen=reopen)
    examine = partial(_examine, resolving=resolving, announce=announce, factories=factories)
    analysis, found = examine(base)
    used = _used_lets(base)
    files = dict(base.files)
    if variant is None and variants:
        for other in base.variants:
            resolution = _resolved(resolving, other, reopen=reopen)
            known = {(item.code, item.label.span, item.message) for item in found}
            for item in examine(resolution, base=analysis)[1]:
                if (item.code, item.label.span, item.message) not in known:
                    found.append(replace(item, help=(*item.help, f"this is so in the variant `{other}`")))
            if not any(map(is_cause, resolution.diagnostics)):
                found.extend(EmptyVariant.find(base, resolution))
            used |= _used_lets(resolution)
            files |= resolution.files
    causes = [item for item in found if is_cause(item)]
    if variant is None and (variants or not base.variants):
        found.extend(UnusedLet.find(base, used, _named_in(base, causes)))
    found.extend(MalformedSuppression.find(item for file in files.values() for item in suppress.malformed(file)))
    kept, _, unused = suppress.split(found, files.values())
    remaining = set(kept)
    accepted = tuple(item for item in errors_of(found) if item not in remaining)
    kept.extend(UnusedSuppression.find(unused, muted=bool(causes or base.scope.asked)))
    return Linted(tuple(sorted(kept, key=lambda item: item.order)), files, base, analysis, accepted)


def _resolved(resolving: Callable[..., Resolution], variant: str | None, *, reopen: bool) -> Resolution:
    from legoai.dsl.holes import all_open

    found = resolving(variant=variant)
    return all_open(found, lambda answers: resolving(variant=variant, answers=answers))[0] if reopen else found


def _domains(analysis: Analysis, found: Sequence[Diagnostic]) -> Iterator[Diagnostic]:
    """The diagnostics of domains, which need the checks of every member."""
    from legoai.dsl.rules.domains import empty_domains

    def errors(plan: Plan) -> list[Diagnostic]:
        other = Analysis(plan, analysis.manifest, analysis.directory, resolution=analysis.resolution)
        return errors_of(check(other))

    yield from empty_domains(analysis.plan, found, errors)


def _not_searched(
    analysis: Analysis, found: Sequence[Diagnostic], resolving: Callable[..., Resolution]
) -> Iterator[Diagnostic]:
    """The diagnostics of holes that `legoai solve` does not fill."""
    from legoai.dsl.holes import all_open, refusals

    closed = analysis.resolution
    assert closed is not None
    complete = analysis.manifest is not None and not errors_of(found)
    opened, _ = all_open(closed, lambda answers: resolving(answers=answers))
    plan = opened.plan
    of_opened = analysis if plan is analysis.plan else None
    if of_opened is None and plan is not None:
        of_opened = Analysis(plan, analysis.manifest, analysis.directory, resolution=opened)
    yield from refusals(opened, of_opened, complete=complete, expands=True)


def _slips(found: list[Diagnostic], analysis: Analysis, resolving: Callable[..., Resolution]) -> list[Diagnostic]:
    """Return the diagnostics without those of what has no effect only by the answers of the plan's holes.

    With its holes open, a plan has the diagnostics that hold for any answers.
    """
    from legoai.dsl.holes import other_answers, readable_open

    codes = {item.code for item in found}
    rules = [rule for rule in checks() if rule.idle and rule.code in codes]
    if not rules:
        return found
    closed = analysis.resolution
    assert closed is not None
    opened, answers = readable_open(closed, lambda answers: resolving(answers=answers))
    if opened is closed or opened.plan is None:
        return found
    of_opened = Analysis(opened.plan, analysis.manifest, analysis.directory, resolution=opened)
    left, undecided = _left(of_opened, rules)
    # What a statement cannot be read without stays answered: other answers stand for its being open.
    needed = ((span, value) for span, value in other_answers(opened, of_opened) if span not in answers)
    for span, value in itertools.islice(needed, _MOST_TRIALS):
        other = resolving(answers={**answers, span: value})
        if other.plan is not None and not other.unreadable:
            of_other = Analysis(other.plan, analysis.manifest, analysis.directory, resolution=other)
            again, stopped = _left(of_other, rules)
            undecided |= stopped
            left = [item for item in left if _is_among(item, again) or item.code in stopped]
    gone = [item for item in found if item.code in {rule.code for rule in rules} and not _is_among(item, left)]
    # A rule that meets an open value stops. Whether what it found follows from an answer, others tell.
    unsure = [item for item in gone if item.code in undecided]
    stopping = [rule for rule in rules if rule.code in undecided]
    for span, value in itertools.islice(other_answers(opened, of_opened), _MOST_TRIALS) if unsure else ():
        other = resolving(answers={span: value})
        if other.plan is not None and not other.unreadable:
            of_other = Analysis(other.plan, analysis.manifest, analysis.directory, resolution=other)
            said = {(item.code, item.message) for item in _checked(of_other, stopping)}
            unsure = [item for item in unsure if (item.code, item.message) in said]
    return [item for item in found if item not in gone or item in unsure]


def _left(analysis: Analysis, rules: Sequence[Check]) -> tuple[list[Diagnostic], set[str]]:
    """Return what rules find in a plan with holes, and the codes of those that stopped at an open value."""
    left: list[Diagnostic] = []
    undecided = set()
    for rule in rules:
        try:
            left.extend(rule.check(analysis))
        except Undecided:
            undecided.add(rule.code)
    return left, undecided


def _is_among(item: Diagnostic, others: Iterable[Diagnostic]) -> bool:
    """Whether others speak of the same, or of more around it."""
    return any(item.code == other.code and item.label.span.is_inside(other.label.span) for other in others)


def _own_fix(item: Diagnostic, resolution: Resolution) -> Diagnostic:
    """Return the diagnostic without a fix that would write into the plan a value from a setting or a variant."""
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


def _with_way_out(item: Diagnostic, resolution: Resolution) -> Diagnostic:
    """Return the diagnostic; an error about an answer of the plan's own holes advises to search for others."""
    nodes = [node for node, _ in resolution.scope.asked.values() if node.span.file == resolution.file.name]
    answers = [node.answer.span for node in nodes if node.answer is not None]
    places = [label.span for label in (item.label, *item.others)]
    is_answer = any(place.is_inside(answer) for place in places for answer in answers)
    if item.severity != "error" or item.code == WrongDomain.code or not is_answer:
        return item
    return replace(item, help=(*item.help, "solve the plan again: its answers are then searched anew"))


def _used_lets(resolution: Resolution) -> set[Span]:
    """Return the `let` statements whose names the plan uses; one that the command line overrides counts as used too."""
    used = resolution.scope.used
    return {item.span for item in resolution.statements if isinstance(item, Let) and item.name.text in used}


def _named_in(resolution: Resolution, causes: Sequence[Diagnostic]) -> set[str]:
    """Return the words of unreadable statements, which may be uses of `let` names."""
    spans = [*resolution.damaged, *(item.span for item in resolution.file.statements)]
    begins = (cause.label.span for cause in causes)
    wrong = Spans(begin._replace(end=begin.start + 1) for begin in begins)
    texts = [resolution.files[span.file].text[span.start : span.end] for span in spans if wrong.overlap(span)]
    return {word for text in texts if not text.startswith("let ") for word in re.findall(r"\w+", text)}


def _examine(
    resolution: Resolution,
    *,
    resolving: Callable[..., Resolution],
    announce: Announce | None,
    base: Analysis | None = None,
    factories: Factories,
) -> tuple[Analysis | None, list[Diagnostic]]:
    """Return the checks' diagnostics for one resolution, after those of reading it.

    ``resolving`` resolves the same text with other answers; ``base`` is the analysis of the plan of which this is a
    variant, which usually has the same model.
    """
    directory = resolution.directory
    found = list(resolution.diagnostics)
    plan = resolution.plan
    if plan is None or resolution.unreadable:
        # Diagnostics about missing parts of a plan would refer to unreadable text.
        return None, found
    same_model = base is not None and base.manifest is not None and base.plan.model == plan.model
    if base is not None and _may_trace(plan) and not _may_trace(base.plan):
        same_model = False  # of whose steps nothing is known yet
    manifest: Manifest | Diagnostic | None
    if base is not None and same_model:
        manifest = base.manifest
    elif not (factories(plan.model) if callable(factories) else factories or plan.model.family != "python"):
        manifest = FactoryNotRun.at(
            plan.model.span_of("target") or resolution.start,
            "the factory is not run, so nothing that depends on the model is checked",
            label="not run",
            # The predicate for factories asks a person first.
            help=["a code action runs it, in a process of its own"]
            if callable(factories) else ["without `--no-factories` it runs, in a process of its own"],
        )  # fmt: skip
    else:
        manifest = manifest_of(plan, resolution, directory, announce)
    if isinstance(manifest, Diagnostic):
        found.append(manifest)
        manifest = None
    analysis = Analysis(plan, manifest, directory, resolution=resolution)
    found.extend(check(analysis))
    if any("auto" in file.text for file in resolution.files.values()):
        again = partial(resolving, variant=resolution.variant)
        found = _slips(found, analysis, again)
        found.extend(_domains(analysis, found))
        found.extend(_not_searched(analysis, found, again))
    found = [_with_way_out(_own_fix(item, resolution), resolution) for item in found]
    remaining = set(suppress.split(found, resolution.files.values())[0])
    accepted = {item for item in found if item not in remaining}
    return analysis, without_effects(found, [item.span for item in resolution.statements], accepted)


def check(analysis: Analysis) -> Iterator[Diagnostic]:
    """Yield the diagnostics of every rule about a resolved plan; suppressions in the plan's text are not applied."""
    return _checked(analysis, checks())


def _checked(analysis: Analysis, rules: Iterable[Check]) -> Iterator[Diagnostic]:
    for rule in rules:
        try:
            # A generator that meets a hole has already yielded its diagnostics before it.
            yield from rule.check(analysis)
        except Undecided:
            continue


def _reported(analysis: Analysis, rule: Check) -> list[Diagnostic]:
    return list(_checked(analysis, [rule]))


def errors(analysis: Analysis, legal: Analysis | None = None) -> list[Diagnostic]:
    """Return the errors of a plan that its own comments do not accept; with holes, those that hold for any answers.

    Args:
        analysis: of the plan.
        legal: a plan of the same text without errors: only rules whose result may differ for this one are run.
    """
    rules: Iterable[Check] = checks_for_errors()
    if legal is not None:
        unlike = analysis.unlike(legal)
        rules = [rule for rule in rules if rule in unlike]
    found = [item for rule in rules for item in analysis.once(rule, partial(_reported, analysis, rule))]
    if found and analysis.resolution is not None:
        found = suppress.split(found, analysis.resolution.files.values())[0]
    return errors_of(found)


def _may_trace(plan: Plan) -> bool:
    """Whether a plan's step may be one graph, for which the model's steps have to be alike."""
    try:
        return traces(plan)
    except Undecided:
        return True


def manifest_of(
    plan: Plan, resolution: Resolution, directory: Path, announce: Announce | None
) -> Manifest | Diagnostic | None:
    """Return the manifest of a plan's model, or the error of its inspection; None where it is known from elsewhere."""
    from legoai.specs.models.manifests.load import load_manifest

    model = plan.model
    try:
        if model.family in FOREIGN and model.target is None:
            return None
        return load_manifest(model.source(), base_directory=directory, steps=_may_trace(plan), announce=announce)
    except ConfigError:
        # The check of the model statement reports invalid dimensions.
        return None
    except ManifestError as error:
        from legoai.dsl.diagnostics.unavailable import unavailable

        return unavailable(error, model, model.span_of("target") or resolution.start, directory)
    except Undecided:
        return None
