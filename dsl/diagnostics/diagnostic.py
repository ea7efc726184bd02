"""Diagnostics as data, independent of output formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from legoai.specs.record import Record, replace
from legoai.specs.span import Span

Severity = Literal["error", "warning", "advice"]


class Label(Record):
    """A span of a plan, with a message about it."""

    span: Span
    text: str = ""


class Edit(Record):
    """A replacement of the characters of ``span``."""

    span: Span
    replacement: str


class Fix(Record):
    """A fix that a tool can apply. A safe one preserves the meaning of the plan; an unsafe one makes a decision."""

    title: str
    edits: tuple[Edit, ...]
    safe: bool


class Diagnostic(Record):
    """One diagnostic.

    ``code`` is stable and never reused for another rule; ``slug`` is its readable name. ``others`` are other spans
    involved, such as the mesh line that a style contradicts. ``help`` gives remedies, a sentence each.
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
        """The sort key of diagnostics: file, position, code."""
        return self.label.span.file, self.label.span.start, self.code


def errors_of(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Those that are errors."""
    return [item for item in diagnostics if item.severity == "error"]


def with_names(diagnostic: Diagnostic, shown: Callable[[str], str]) -> Diagnostic:
    """A diagnostic with other names of files, in its spans and its texts."""

    def labelled(label: Label) -> Label:
        return replace(label, text=shown(label.text))

    named = replace(
        diagnostic,
        message=shown(diagnostic.message),
        label=labelled(diagnostic.label),
        others=tuple(map(labelled, diagnostic.others)),
        help=tuple(map(shown, diagnostic.help)),
    )
    return with_spans(named, lambda span: span._replace(file=shown(span.file)))


def with_spans(diagnostic: Diagnostic, of: Callable[[Span], Span]) -> Diagnostic:
    """A diagnostic with other spans in the place of its own."""

    def placed(label: Label) -> Label:
        return replace(label, span=of(label.span))

    fix = diagnostic.fix
    return replace(
        diagnostic,
        label=placed(diagnostic.label),
        others=tuple(map(placed, diagnostic.others)),
        fix=fix and replace(fix, edits=tuple(replace(edit, span=of(edit.span)) for edit in fix.edits)),
    )


def with_line_ends_of(text: str, added: str) -> str:
    """Lines that are added to a text, with its line ends."""
    return added.replace("\n", "\r\n") if "\r\n" in text and "\r\n" not in added else added


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
            pieces.append(with_line_ends_of(text, edit.replacement))
            done = edit.span.end
    return "".join(pieces) + text[done:]
