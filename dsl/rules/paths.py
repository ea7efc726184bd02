"""Rules about path patterns, for every directive that has a block."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.codes.names import AmbiguousRules, NoSuchPath
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.diagnostics.suggestion import closest
from legoai.dsl.frontend.paths import pattern, segments_of
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule
from legoai.specs.span import Span


def _span(rule: PathRule[object]) -> Span:
    assert rule.path_origin.span is not None, "a rule is always written by a person"
    return rule.path_origin.span


class PathsMatch(NoSuchPath, Check):
    """Every pattern matches something (see ``no-such-path``)."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for directive in analysis.plan.directives():
            if not directive.rules:
                continue
            for rule in analysis.assigned(directive).unmatched:
                nearest = _nearest(rule.path, analysis)
                span = _span(rule)
                fix = None
                help = []
                if nearest is not None:
                    help.append(f"did you mean `{nearest}`?")
                    fix = Fix(f"write `{nearest}`", (Edit(span, nearest),), safe=False)
                what = "module or parameter" if directive.keyword == "shard" else "module"
                place = analysis.place(analysis.plan.model, "family")
                yield self.at(
                    span,
                    f"`{rule.path}` matches no {what} of the model",
                    label="matches nothing",
                    others=[Label(place, f"the model has {len(analysis.manifest.modules)} modules")],
                    help=help,
                    fix=fix,
                )


def _nearest(path: str, analysis: Analysis) -> str | None:
    """The pattern with the wrong segment replaced by a name of the model that is like it."""
    known = analysis.module_and_parameter_paths
    segments = [segment for _, segment in segments_of(path)]
    for end in range(1, len(segments) + 1):
        if known.matching(pattern(".".join(segments[:end]))):
            continue
        above = ".".join(segments[: end - 1])
        prefixes = known.matching(pattern(above)) if above else [""]
        legal = sorted({
            name[len(prefix) + bool(prefix) :].split(".")[0]
            for prefix in prefixes[:1]
            for name in known.names
            if name.startswith(f"{prefix}." if prefix else "") and name != prefix
        })  # fmt: skip
        word = closest(segments[end - 1], legal)
        if word is None:
            return None
        candidate = ".".join([*segments[: end - 1], word, *segments[end:]])
        return candidate if known.matching(pattern(candidate)) else None
    return None


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
                    _span(second),
                    f"two rules give `{path or 'root'}` different values, and neither path is more specific",
                    label="gives it another value",
                    others=[Label(_span(first), "gives it one value")],
                    help=["make one of the two paths more specific, or take the module out of one"],
                )
