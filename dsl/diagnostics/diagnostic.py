"""What the tool says about a plan: diagnostics as data, before any format."""

from __future__ import annotations

from typing import Literal

from legoai.specs.record import Record
from legoai.specs.span import Span

Severity = Literal["error", "warning", "advice"]


class Label(Record):
    """A place in a plan, and what is to be said about it there."""

    span: Span
    text: str = ""


class Edit(Record):
    """A replacement of the characters of ``span``."""

    span: Span
    replacement: str


class Fix(Record):
    """A cure that a tool can apply. A safe one leaves what the plan means; an unsafe one decides something."""

    title: str
    edits: tuple[Edit, ...]
    safe: bool


class Diagnostic(Record):
    """One diagnostic.

    ``code`` is stable and never used again for another rule; ``slug`` is its readable name. ``others`` are the other
    places that take part, such as the mesh line that a style contradicts. ``help`` says what to do, a sentence each.
    """

    code: str
    slug: str
    severity: Severity
    message: str
    label: Label
    others: tuple[Label, ...] = ()
    help: tuple[str, ...] = ()
    fix: Fix | None = None

    @property
    def order(self) -> tuple[str, int, str]:
        """The key by which diagnostics are listed: file, place, code."""
        return self.label.span.file, self.label.span.start, self.code


def apply_fixes(text: str, fixes: list[Fix]) -> str:
    """The text after the fixes. Of two fixes that touch the same characters the one that begins first wins."""
    done = 0
    pieces = []
    for fix in sorted(fixes, key=lambda fix: min(edit.span.start for edit in fix.edits)):
        edits = sorted(fix.edits, key=lambda edit: edit.span.start)
        if edits[0].span.start < done:
            continue
        for edit in edits:
            pieces.append(text[done : edit.span.start])
            pieces.append(edit.replacement)
            done = edit.span.end
    return "".join(pieces) + text[done:]
