"""LP9xx: parts of a plan without effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.question import solved_digest
from legoai.dsl.analysis.stages.pipeline import stage_of
from legoai.dsl.diagnostics.codes.statements import CannotExtend
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.parsing.suppress import NEVER_ACCEPTED, Malformed, Suppression
from legoai.dsl.frontend.paths import pattern
from legoai.dsl.frontend.resolve import Resolution
from legoai.dsl.frontend.statements.likeness import likeness
from legoai.dsl.frontend.syntax import Let, Name, Statement, Variant
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import Divided, PathRule, Staged
from legoai.specs.plan import Plan
from legoai.specs.record import replace
from legoai.specs.span import Span


class UnusedLet(Rule):
    """A `let` name that nothing uses.

    It is either a leftover, or a literal value that should refer to it does not.

    ## Example
    ```
    let hosts = 32
    cluster h100_sxm(hosts = 16, fabric = infiniband_ndr)
    ```

    ## Use instead
    ```
    let hosts = 32
    cluster h100_sxm(hosts = hosts, fabric = infiniband_ndr)
    ```
    """

    code = "LP901"
    slug = "unused-let"
    severity = "warning"

    @classmethod
    def find(cls, resolution: Resolution, used: set[Span], named: set[str]) -> Iterator[Diagnostic]:
        """Every `let` of the plan's own file, those of its variants among them, whose value nothing takes.

        Args:
            resolution: of the plan without a variant.
            used: the spans of the `let` that the plan or a variant uses.
            named: words in text that could not be read, which may be uses.
        """
        if any(item.code == CannotExtend.code for item in resolution.diagnostics):
            return  # the base may use them
        own = resolution.file.statements
        inside = (item for variant in own if isinstance(variant, Variant) for item in variant.statements)
        for statement in (*own, *inside):
            if not isinstance(statement, Let) or statement.name.text in named:
                continue
            if statement.span not in used:
                yield cls.at(
                    statement.name.span,
                    f"nothing uses `{statement.name.text}`",
                    label="unused",
                    help=["use the name, or delete the line"],
                )


class EmptyStatement(Check):
    """A statement without effect.

    A bare `checkpoint` recomputes nothing, a bare `compile` compiles nothing, and a block whose rules are all `none`
    removes nothing. In an extending plan or a variant such a statement may replace another one; `unset` states that
    explicitly.

    ## Example
    ```
    checkpoint
    ```

    ## Use instead
    ```
    checkpoint { layers.* = full }
    ```
    """

    code = "LP906"
    slug = "empty-statement"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.resolution is None:
            return
        statements = [item for item in analysis.resolution.statements if isinstance(item, Statement)]
        for statement in statements:
            why = _why_idle(statement)
            if why is None or _replaces(statement, analysis.resolution):
                continue
            keyword = statement.keyword.text
            yield self.at(
                statement.keyword.span,
                f"`{keyword}` has no effect: {why}",
                label="says nothing",
                help=["leave the statement out, or write what is meant"],
            )


_BY_CONTENT: Final = {
    "mesh": "it names no axis",
    "shard": "it has no rules",
    "checkpoint": "nothing is recomputed",
    "comm": "it has neither options nor rules",
    "compile": "nothing is compiled",
    "precision": "it has neither options nor rules",
    "attention": "it names no kernel",
    "loss": "it names no form",
    "optimizer": "it names no algorithm",
    "schedule": "it names no form",
}
"""Statements without effect of their own, and the state without any content."""


def _why_idle(statement: Statement) -> str | None:
    """Why a statement has no effect; None for one that may have some."""
    rules = statement.block.rules if statement.block is not None else ()
    given = statement.subject is not None or (statement.options is not None and statement.options.items)
    if given or any(not isinstance(rule.value, Name) or rule.value.text != "none" for rule in rules):
        return None
    return _BY_CONTENT.get(statement.keyword.text)


def _replaces(statement: Statement, resolution: Resolution) -> bool:
    """Whether a statement replaces another, of a base plan or of the plan of the variant."""
    key = likeness(statement)
    others = (item for file in resolution.files.values() for item in file.statements if isinstance(item, Statement))
    return any(likeness(other) == key and other.span != statement.span for other in others)


class EmptyVariant(Rule):
    """A variant that changes nothing.

    It is empty, or repeats what the plan states without it.

    ## Example
    ```
    clip (norm = 1.0)

    variant gentle { clip (norm = 1.0) }
    ```

    ## Use instead
    ```
    clip (norm = 1.0)

    variant gentle { clip (norm = 0.5) }
    ```
    """

    code = "LP907"
    slug = "empty-variant"
    severity = "warning"

    @classmethod
    def find(cls, base: Resolution, other: Resolution) -> Iterator[Diagnostic]:
        """A diagnostic where ``other``, the plan under one of its variants, comes to the plan without it."""
        variant = base.variants[other.variant] if other.variant is not None else None
        if variant is None or variant.name.span.file != base.file.name or base.plan is None or other.plan is None:
            return
        if variant.statements and (base.unreadable or other.unreadable or not _same_plan(base.plan, other.plan)):
            return
        yield cls.at(
            variant.name.span,
            f"the variant `{variant.name.text}` changes nothing",
            label="the same plan" if variant.statements else "an empty variant",
            help=["write what it changes, or delete it"],
        )


def _same_plan(left: Plan, right: Plan) -> bool:
    """Whether two plans run the same, under the same requirements and objective."""
    one, other = (replace(plan, variant=None) for plan in (left, right))
    return bool(one.canonical() == other.canonical() and one.goals() == other.goals())


class ShadowedRule(Check):
    """A rule that never wins, because more specific rules cover every path that it matches.

    ## Example
    ```
    checkpoint {
      layers.**     = none
      layers.*      = full
      layers.{0..9} = full
      layers.*.**   = none
    }
    ```

    ## Use instead
    Delete the line that has no effect, or make its path more specific.
    """

    code = "LP902"
    slug = "shadowed-rule"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        if analysis.manifest is None:
            return
        for directive in analysis.plan.directives():
            if not directive.rules:
                continue
            for rule, winner in analysis.assigned(directive).shadowed:
                span, over = rule.path_origin.span, winner.path_origin.span
                assert span is not None
                assert over is not None
                yield self.at(
                    span,
                    f"the rule for `{rule.path}` has no effect: other rules win for every path that it matches",
                    label="never wins",
                    others=[Label(over, "wins over it")],
                    help=["delete the line, or make its path more specific"],
                )


class DividedForNothing(Check):
    """A rule that treats its first modules separately, where there are no others or both are treated equally.

    The same holds for one that treats the stages of a pipeline separately, and all of them equally.

    ## Example
    ```
    checkpoint { layers.* = first(1000, full, others = selective([attention])) }
    ```

    ## Use instead
    ```
    checkpoint { layers.* = first(2, full, others = selective([attention])) }
    ```
    """

    code = "LP908"
    slug = "divided-for-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for directive in analysis.plan.directives():
            for rule in directive.rules:
                treatment = rule.treatment
                if not isinstance(treatment, Divided | Staged) or is_open(treatment):
                    continue
                matched = (
                    [] if analysis.manifest is None else analysis.paths_for(directive).matching(pattern(rule.path))
                )
                if isinstance(treatment, Divided):
                    yield from self._divided(analysis, treatment, len(matched), f"`{rule.path}` matches {len(matched)}")
                else:
                    yield from self._staged(analysis, rule, matched)

    def _staged(self, analysis: Analysis, rule: PathRule[Staged], matched: Sequence[str]) -> Iterator[Diagnostic]:
        each = rule.treatment.each
        if len(each) > 1 and all(one == each[0] for one in each) and not isinstance(each[0], Divided):
            yield self.at(
                analysis.span_of(rule.treatment, "each"),
                "every stage is treated alike",
                label="the same for all",
                help=["write it without `stages`"],
            )
        held = Counter(stage_of(analysis, path) for path in matched)
        for stage, one in enumerate(each):
            if isinstance(one, Divided):
                yield from self._divided(analysis, one, held[stage], f"stage {stage} has {held[stage]}")

    def _divided(self, analysis: Analysis, divided: Divided, count: int, why: str) -> Iterator[Diagnostic]:
        if divided.these == divided.others:
            yield self.at(
                analysis.span_of(divided, "these"),
                "the first modules are treated as the others are",
                label="the same as `others`",
                help=["write it without `first`"],
            )
        elif 0 < count <= divided.n:
            yield self.at(
                analysis.span_of(divided, "n"),
                f"`first({divided.n}, …)` leaves no others: {why}",
                label="all of them",
                help=["write the treatment of the first ones alone, or a smaller number"],
            )


class UnusedSuppression(Rule):
    """A `# legoai: ignore[…]` that suppresses nothing.

    The diagnostic is gone, the code is wrong, or the diagnostic cannot be accepted: text that cannot be read
    (LP1xx) and names that mean nothing (LP2xx). A comment behind a line speaks of that line, one alone on its line of
    the next; where a statement, a rule or an option ends on the one or begins on the other, of all its lines.
    In a plan with `auto` another answer may need it, and it is not reported.
    """

    code = "LP903"
    slug = "unused-suppression"
    severity = "warning"

    @classmethod
    def find(
        cls, unused: Iterable[Suppression], *, simulated: bool = False, muted: bool = False
    ) -> Iterator[Diagnostic]:
        """Yield a diagnostic for each suppression that suppressed nothing.

        Rules that need a simulation may apply unless the plan was ``simulated``, and others may be ``muted``, by an
        error in a name or until a hole has another answer; no diagnostic is made for these.
        """
        from legoai.dsl.rules import all_rules, rule_of

        for item in unused:
            rule = rule_of(item.code)
            if (rule is not None and rule.simulated) is not simulated:
                continue
            if rule is None:
                codes, slugs = (tuple(getattr(rule, name) for rule in all_rules()) for name in ("code", "slug"))
                help = suggestion(item.code.replace("O", "0"), codes) or suggestion(item.code.lower(), slugs)
                message = f"there is no rule `{item.code}`"
            elif rule.code.startswith(NEVER_ACCEPTED):
                message, help = f"`{item.code}` cannot be suppressed", ["it leaves nothing to accept: correct it"]
            elif muted:
                continue
            else:
                message, help = f"`{item.code}` is not found here, so nothing is suppressed", ["delete it"]
            yield cls.at(
                item.span,
                message,
                label="suppresses nothing",
                help=help,
                fix=Fix("delete the suppression", (Edit(item.whole, ""),), safe=False),
            )


class MalformedSuppression(Rule):
    """A comment that is meant to suppress a diagnostic and is not written as one, so that it suppresses nothing.

    A suppression is `# legoai: ignore[CODE]`, in lower case, with the accepted codes between the brackets. A reason may
    be given before the `#` of the suppression, in a comment of its own, or after the bracket.

    ## Example
    ```
    let spare = 4  # LegoAI: ignore LP901
    ```

    ## Use instead
    ```
    let spare = 4  # legoai: ignore[LP901]
    ```
    """

    code = "LP905"
    slug = "malformed-suppression"
    severity = "warning"

    @classmethod
    def find(cls, comments: Iterable[Malformed]) -> Iterator[Diagnostic]:
        """A diagnostic for each such comment; one that names codes has a fix."""
        for item in comments:
            right = f"# legoai: ignore[{', '.join(item.codes) or 'CODE'}]"
            why = "this looks like a suppression and is none" if item.codes else "a suppression names what it accepts"
            yield cls.at(
                item.span,
                f"{why}: it suppresses nothing",
                label="suppresses nothing",
                help=[f"write `{right}`"],
                fix=Fix(f"write `{right}`", (Edit(item.span, right),), safe=False) if item.codes else None,
            )


class StaleSolution(Check):
    """A plan whose `solved` line belongs to another text, since something was changed after solving.

    The answers after `->` were the best for the plan as it was then: for its domains, requirements and objective too.
    A plan that extends a solved one may differ from it: the line belongs to the base, and linting the base checks it.

    ## Use instead
    Solve the plan again, or pin the values and delete the line.
    """

    code = "LP904"
    slug = "stale-solution"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        solved, resolution = analysis.plan.solved, analysis.resolution
        if solved is None or resolution is None or resolution.plan is None:
            return
        digest = solved_digest(resolution)
        if solved.digest == digest:
            return
        span = solved.origin.span
        assert span is not None
        if span.file != resolution.file.name:
            return  # the line is of the text of a base
        if resolution.variant is not None:
            variant = resolution.variants.get(resolution.variant)
            own = variant.span if variant is not None else span
            if not (own.file == span.file and own.start <= span.start < own.end):
                return  # the line matches the plan
        yield self.at(
            span,
            "the plan was changed after it was solved",
            label=f"the plan is now {digest[:19]}…",
            help=["solve the plan again, or keep the values and delete this line"],
        )
