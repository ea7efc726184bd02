"""Lint rule: a code, a slug and a page of documentation for one kind of diagnostic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from legoai.dsl.diagnostics.diagnostic import Diagnostic, Fix, Label, Severity
from legoai.specs.span import Span


class Rule:
    """A kind of diagnostic. The class's docstring is the rule's page, as ``legoai explain CODE`` prints it.

    The docstring's first line states what the rule finds; then come "What it does", "Why it is wrong" (or "Why it
    matters"), "Example" and "Use instead".
    """

    code: ClassVar[str]
    slug: ClassVar[str]
    severity: ClassVar[Severity] = "error"
    simulated: ClassVar[bool] = False
    """Whether it needs a simulation, which `legoai check` runs and linting does not."""
    idle: ClassVar[bool] = False
    """Whether it finds what has no effect: a slip, unless it follows from an answer of `legoai solve`."""

    @classmethod
    def at(
        cls,
        span: Span,
        message: str,
        *,
        label: str = "",
        others: Sequence[Label] = (),
        help: Sequence[str] = (),
        fix: Fix | None = None,
    ) -> Diagnostic:
        """A diagnostic of this rule at ``span``."""
        return Diagnostic(
            cls.code, cls.slug, cls.severity, message, Label(span, label), tuple(others), tuple(help), fix
        )
