"""Formatter of a plan's text, which checks that the result is equivalent."""

from __future__ import annotations

from dataclasses import dataclass

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend.parse import parse
from legoai.dsl.frontend.syntax import PlanFile, same


class FormattingError(Exception):
    """The formatter would have changed a plan's meaning: an internal error."""


@dataclass(frozen=True, slots=True)
class Formatted:
    """A plan's text in the canonical layout; None where it could not be read, for the reasons in ``diagnostics``."""

    text: str | None
    diagnostics: tuple[Diagnostic, ...]


def format_text(text: str, name: str) -> Formatted:
    """Format the text of the plan called ``name``.

    Raises:
        FormattingError: the result would not be equivalent to ``text``.
    """
    parsed = parse(text, name)
    if parsed.diagnostics:
        return Formatted(None, parsed.diagnostics)
    after = format_plan(parsed.file)
    check_format(parsed.file, after)
    return Formatted(after, ())


def check_format(before: PlanFile, after: str) -> None:
    """Check that ``after`` is ``before`` formatted: same tree, no comment lost, unchanged when formatted again.

    Raises:
        FormattingError: it is not.
    """
    parsed = parse(after, before.name)
    if parsed.diagnostics:
        found = parsed.diagnostics[0]
        raise FormattingError(f"the formatted plan cannot be read: {found.label.span}: {found.message}")
    if not same(before.statements, parsed.file.statements):
        raise FormattingError("the formatted plan says something else")
    if _comments(before) != _comments(parsed.file):
        raise FormattingError("formatting lost or moved a comment")
    if format_plan(parsed.file) != after:
        raise FormattingError("formatting the formatted plan changes it again")


def _comments(file: PlanFile) -> list[str]:
    return [comment.text.rstrip() for comment in file.comments]
