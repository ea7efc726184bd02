"""LP9xx: what a plan says for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.resolve import Resolution
from legoai.dsl.frontend.suppress import NEVER_ACCEPTED, Malformed, Suppression
from legoai.dsl.frontend.syntax import Let
from legoai.dsl.rules.base import Check


class UnusedLet(Rule):
    """A `let` name that nothing uses.

    Either it is a leftover, or a value that should follow it is written out and will not.

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
    def find(cls, resolution: Resolution, used: set[str]) -> Iterator[Diagnostic]:
        """Every name of the plan's own file that neither it nor a variant uses."""
        for statement in resolution.file.statements:
            if isinstance(statement, Let) and statement.name.text not in used:
                yield cls.at(
                    statement.name.span,
                    f"nothing uses `{statement.name.text}`",
                    label="unused",
                    help=["use the name, or delete the line"],
                )


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


class UnusedSuppression(Rule):
    """A `# legoai: ignore[…]` that suppresses nothing.

    The diagnostic is gone, the code is wrong, or the diagnostic cannot be accepted: text that cannot be read
    (LP1xx) and names that mean nothing (LP2xx). A comment behind a line speaks of that line, one alone on its line of
    the next; where a statement, a rule or an option ends on the one or begins on the other, of all its lines.
    """

    code = "LP903"
    slug = "unused-suppression"
    severity = "warning"

    @classmethod
    def find(
        cls, unused: Iterable[Suppression], *, simulated: bool = False, muted: bool = False
    ) -> Iterator[Diagnostic]:
        """A diagnostic for each suppression that took nothing away.

        What only a simulation finds may be there: nothing is said of it unless the plan was ``simulated``; nor of what
        may be ``muted`` by a mistake in a name.
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
                message, help = f"`{item.code}` cannot be suppressed", ["it leaves no plan to accept: correct it"]
            elif muted:
                continue
            else:
                message, help = f"`{item.code}` is not found here, so nothing is suppressed", ["delete it"]
            yield cls.at(
                item.span,
                message,
                label="suppresses nothing",
                help=help,
                fix=Fix("delete the code", (Edit(item.span, ""),), safe=False),
            )


class MalformedSuppression(Rule):
    """A comment that is meant to suppress a diagnostic and is not written as one, so that it suppresses nothing.

    A suppression is `# legoai: ignore[CODE]`, in small letters, with the codes that are accepted between the
    brackets. A reason may stand before the `#` of the suppression, in a comment of its own, or behind the bracket.

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
    """A plan whose `solved` line belongs to another text: something was changed after it was solved.

    The answers behind `->` were the best for the plan as it was then.

    ## Use instead
    Solve the plan again, or pin the values and delete the line.
    """

    code = "LP904"
    slug = "stale-solution"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        solved = analysis.plan.solved
        if solved is None or solved.digest == analysis.plan.digest:
            return
        assert solved.origin.span is not None
        yield self.at(
            solved.origin.span,
            "the plan was changed after it was solved",
            label=f"the plan is now {analysis.plan.digest[:19]}…",
            help=["solve the plan again, or keep the values and delete this line"],
        )
