"""Rules about path patterns, for every directive that has a block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.codes.names import AmbiguousRules, NoSuchPath
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.frontend.paths import Braces, Paths, pattern
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.nearest import nearest
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.optimizer import Muon
from legoai.specs.span import Span


class PathsMatch(NoSuchPath, Check):
    """Every pattern matches something (see ``no-such-path``)."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for directive in analysis.plan.directives():
            if not directive.rules:
                continue
            known = analysis.paths_for(directive)
            for rule in analysis.assigned(directive).unmatched:
                close = nearest(rule.path, analysis)
                span = rule.path_origin.written
                of_parameter = close is not None and not known.matching(pattern(close))
                if close is not None and of_parameter:
                    close = close.rpartition(".")[0] or None
                fix = None
                help = []
                if close is not None:
                    help.append(f"did you mean `{close}`?")
                    if of_parameter:
                        help.append(f"rules of `{directive.keyword}` are for modules, with all of their parameters")
                    if rule.path_origin.decider == "human":
                        fix = Fix(f"write `{close}`", (Edit(span, close),), safe=False)
                what = "module or parameter" if directive.names_parameters else "module"
                place = analysis.span_of(analysis.plan.model, "family")
                yield self.at(
                    span,
                    f"`{rule.path}` matches no {what} of the model",
                    label="matches nothing",
                    others=[Label(place, f"the model has {len(analysis.manifest.modules)} modules")],
                    help=help,
                    fix=fix,
                )
            unmatched = {id(rule) for rule in analysis.assigned(directive).unmatched}
            for rule in directive.rules:
                if "{" in rule.path and id(rule) not in unmatched:
                    yield from self._members(rule, known, analysis)

    def _members(self, rule: PathRule[object], known: Paths, analysis: Analysis) -> Iterator[Diagnostic]:
        """Alternatives and ends of ranges that match nothing, in a pattern that matches something."""
        for braces, idle in known.idle_members(pattern(rule.path)):
            if len(idle) == len(braces.members):
                continue  # of an undecided rule, whose matches are not known
            if braces.is_range:
                yield from self._range(rule, braces, idle, analysis)
                continue
            for word in idle:
                meant = _meant(rule.path, braces, word, analysis)
                others = [item for item in braces.members if item != word]
                kept = f"{{{', '.join(others)}}}" if others[1:] else others[0]
                span = _part(rule, braces, word, analysis)
                whole = f"{rule.path[: braces.start - 1]}{kept}{rule.path[braces.end + 1 :]}"
                fix = None
                if meant is not None and span != rule.path_origin.written:
                    fix = Fix(f"write `{meant}`", (Edit(span, meant),), safe=False)
                yield self.at(
                    span,
                    f"`{word}` in `{rule.path}` matches nothing of the model",
                    label="this alternative matches nothing",
                    others=[_modules(analysis)],
                    help=[f"did you mean `{meant}`?" if meant else f"leave it out: `{whole}`"],
                    fix=fix,
                )

    def _range(
        self, rule: PathRule[object], braces: Braces, idle: tuple[str, ...], analysis: Analysis
    ) -> Iterator[Diagnostic]:
        first, last = braces.members[0], braces.members[-1]
        if first not in idle and last not in idle:
            return
        held = [member for member in braces.members if member not in idle]
        right = f"{held[0]}..{held[-1]}" if held[1:] else held[0]
        span = _part(rule, braces, None, analysis)
        wrong = [item for item in idle if int(item) < int(held[0]) or int(item) > int(held[-1])]
        named = f"`{wrong[0]}`" if len(wrong) == 1 else f"`{wrong[0]}` to `{wrong[-1]}`"
        fits = span != rule.path_origin.written
        yield self.at(
            span,
            f"{named} of the range in `{rule.path}` match{'es' if len(wrong) == 1 else ''} nothing of the model",
            label="reaches beyond what there is",
            others=[_modules(analysis)],
            help=[f"write `{{{right}}}`"],
            fix=Fix(f"write `{right}`", (Edit(span, right),), safe=False) if fits else None,
        )


def _modules(analysis: Analysis) -> Label:
    assert analysis.manifest is not None
    place = analysis.span_of(analysis.plan.model, "family")
    return Label(place, f"the model has {len(analysis.manifest.modules)} modules")


def _part(rule: PathRule[object], braces: Braces, member: str | None, analysis: Analysis) -> Span:
    """Return the span of a member of the braces, or of all their contents; of the whole path if it is computed."""
    span = rule.path_origin.written
    file = analysis.resolution.files.get(span.file) if analysis.resolution is not None else None
    text = file.text[span.start : span.end] if file is not None else ""
    written = _contents(rule.path[braces.start : braces.end])
    place = next((pair for pair in re.finditer(r"\{([^{}]*)\}", text) if _contents(pair[1]) == written), None)
    if place is None or span.line != span.end_line:
        return span
    start, end = place.span(1)
    if member is not None:
        found = re.search(rf"(?<![\w-]){re.escape(member)}(?![\w-])", place[1])
        if found is None:
            return span
        start, end = start + found.start(), start + found.end()
    return span._replace(
        start=span.start + start, end=span.start + end, column=span.column + start, end_column=span.column + end
    )


def _contents(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _meant(path: str, braces: Braces, word: str, analysis: Analysis) -> str | None:
    """The name that an alternative was probably meant to be."""
    before, behind = path[: braces.start - 1], path[braces.end + 1 :]
    close = nearest(f"{before}{word}{behind}", analysis)
    if close is None or not (close.startswith(before) and close.endswith(behind)):
        return None
    meant = close[len(before) : len(close) - len(behind)]
    return meant if meant not in braces.members and "." not in meant else None


class RulesAgree(AmbiguousRules, Check):
    """No two equally specific rules disagree (see ``ambiguous-rules``)."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for directive in analysis.plan.directives():
            if not directive.rules:
                continue
            for path, first, second in analysis.assigned(directive).conflicts:
                yield self.at(
                    second.path_origin.written,
                    f"two rules give `{path or 'root'}` different values, and neither path is more specific",
                    label="gives it another value",
                    others=[Label(first.path_origin.written, "gives it one value")],
                    help=_agreement(analysis, path, first, second),
                )


def _agreement(analysis: Analysis, path: str, first: PathRule[Any], second: PathRule[Any]) -> list[str]:
    """What makes two rules agree about a path."""
    assert analysis.manifest is not None
    muon = next((rule for rule in (first, second) if isinstance(rule.treatment, Muon)), None)
    if muon is not None and muon.path.endswith(".**"):
        paths, shapes = analysis.module_and_parameter_paths, dict(analysis.manifest.parameters())
        both = set(paths.matching(pattern(first.path))) & set(paths.matching(pattern(second.path)))
        if all(len(shapes.get(item, (0, 0))) != 2 for item in both):
            modules = muon.path.removesuffix("*")
            return [
                f"write `{modules} = muon(…)`: Muon takes the matrices in these modules, and `{path}` is none and "
                "follows the other rule"
            ]
    return ["make one of the two paths more specific, or take the module out of one"]
