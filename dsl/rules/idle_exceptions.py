"""`none`: rules about exceptions that leave modules treated as before."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import following, grouped, holders, name_of
from legoai.dsl.analysis.parallelism.experts import distributed_experts
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.frontend.paths import assign, pattern
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import Directive, PathRule
from legoai.specs.directives.fsdp import NoUnit


class IdleException(Check):
    """A `none` that takes no treatment away.

    `none` speaks of the modules that its rule matches, not of what is inside of them or around them. It has no effect
    where

    - rules treat the parts of a module and not the module itself: the parts keep their treatments;
    - a module around it is recomputed as a whole;
    - it is of experts on `ep`, which are always units of `fsdp`: fewer ranks hold their parameters.

    ## Example
    ```
    checkpoint { layers.* = full, layers.*.attention = none }
    ```

    ## Example
    ```
    precision { layers.*.feed_forward.* = float8, layers.0 = none }
    ```

    ## Use instead
    ```
    checkpoint { layers.*.feed_forward = full }
    ```
    """

    code = "LP909"
    slug = "idle-exception"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for directive in analysis.plan.directives():
            for rule, own in _idle(analysis, directive):
                around = _recomputed_around(analysis, rule, own) if directive is analysis.plan.checkpoint else None
                yield from self._of_parts(analysis, directive, rule, own) if around is None else [around]
        yield from self._of_experts(analysis)

    def _of_parts(
        self, analysis: Analysis, directive: Directive, rule: PathRule[Any], own: Collection[str]
    ) -> Iterator[Diagnostic]:
        """Yield a rule for modules whose parts another rule treats, which treats as much elsewhere."""
        inside: dict[str, tuple[str, str, PathRule[Any]]] = {}
        elsewhere = set()
        for path, other in analysis.assigned(directive).by_path.items():
            if _is_none(other):
                continue
            holder = next((above for above in holders(path) if above in own), None) if path else None
            if holder is None:
                elsewhere.add(other.path)
            else:
                inside.setdefault(other.path, (holder, path, other))
        # A rule for these parts alone states a treatment of parts beside none of the whole: both are meant.
        found = next((item for written, item in inside.items() if written in elsewhere), None)
        if found is None:
            return
        holder, part, other = found
        relative = part[len(holder) + 1 :] if holder else part
        kept = f"`{part}` keeps `{other.treatment.name}`"
        yield self.at(
            analysis.rule_span(rule),
            f"`none` has no effect: `{name_of(holder)}` itself has no other treatment, and {kept}",
            label=f"is not for `{relative}` in it",
            others=[Label(analysis.rule_span(other), "treats parts of it")],
            help=[f"name the parts: `{name_of(holder)}.{relative} = none`"],
        )

    def _of_experts(self, analysis: Analysis) -> Iterator[Diagnostic]:
        without = following(analysis, analysis.plan.fsdp, NoUnit)
        if not without:
            return
        experts = [(path, without[path]) for path in distributed_experts(analysis) if path in without]
        for rule, paths in grouped(experts):
            yield self.at(
                analysis.rule_span(rule),
                f"`none` has no effect: `{paths[0]}` is a unit of its own, since its experts are on `ep`",
                label="always a unit",
                others=[Label(analysis.span_of(analysis.plan.mesh, "ep"), "fewer ranks hold the same experts")],
                help=["leave the experts out"],
            )


def _is_none(rule: PathRule[Any]) -> bool:
    return bool(rule.treatment.name == "none")


def _idle(analysis: Analysis, directive: Directive) -> Iterator[tuple[PathRule[Any], list[str]]]:
    """Yield each `none` that wins over no treatment, with the modules that it decides."""
    rules = directive.rules
    if any(is_open(rule.treatment) for rule in rules) or not any(map(_is_none, rules)):
        return
    paths = analysis.paths_for(directive)
    treated = {path for rule in rules if not _is_none(rule) for path in paths.matching(pattern(rule.path))}
    # `assigned` leaves out modules that a `none` of `shard` decides.
    for rule, own in grouped(assign(rules, paths).by_path.items()):
        if _is_none(rule) and treated.isdisjoint(own):
            yield rule, own


def _recomputed_around(analysis: Analysis, rule: PathRule[Any], own: Collection[str]) -> Diagnostic | None:
    """Return the diagnostic of a rule for modules inside of one that is recomputed as a whole."""
    recomputed = recomputed_modules(analysis)
    matched = pattern(rule.path)
    for path in own:
        outer = next((above for above in holders(path) if above in recomputed), None) if path else None
        # A pattern of the outer module too, such as `layers.**`, is what holds where no other rule wins.
        if outer is not None and not matched.matches(outer):
            return IdleException.at(
                analysis.rule_span(rule),
                f"`none` has no effect: `{name_of(outer)}` is recomputed as a whole",
                label=f"`{path}` is inside of it",
                others=[Label(analysis.rule_span(recomputed[outer]), "recomputes what holds it")],
                help=["recompute the other modules of it instead, each by a rule"],
            )
    return None
