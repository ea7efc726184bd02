"""Diagnostics as the protocol publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lsprotocol import types

from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label, Severity
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.reporting.output import message_of
from legoai.dsl.server.documents import Checked, place_of, uri_of

SEVERITIES: Final[dict[Severity, types.DiagnosticSeverity]] = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "advice": types.DiagnosticSeverity.Information,
}

_UNNECESSARY: Final = ("unused-", "idle-", "empty-statement", "empty-variant", "shadowed-rule", "divided-for-nothing")
"""Names or prefixes of rules about text that could be deleted: editors show it faded."""

_MOST: Final = 300
"""Diagnostics that are published: more than anyone reads, and few enough for an editor to draw."""


def published(checked: Checked) -> list[types.Diagnostic]:
    """Return the diagnostics of a document. Those of a base plan are shown at its `extends`.

    Of very many only the first are published, errors before warnings, and one diagnostic counts the others.
    """
    found = checked.diagnostics
    if len(found) <= _MOST:
        return [published_form(item, checked) for item in found]
    first = sorted(found, key=lambda item: list(SEVERITIES).index(item.severity))[:_MOST]
    left = len(found) - len(first)
    others = types.Diagnostic(
        range=range_of(first[-1], checked),
        message=f"{left} more diagnostics are not shown; `legoai lint` prints all",
        severity=types.DiagnosticSeverity.Information,
        source="legoai",
    )
    return [*(published_form(item, checked) for item in first), others]


def published_form(item: Diagnostic, checked: Checked) -> types.Diagnostic:
    """Return a diagnostic of a document as it is published."""
    document = checked.document
    here = item.label.span.file == document.name
    others = item.others if here else (item.label, *item.others)
    # A span without a file has no text either: it refers to the whole document.
    labels = [found for label in others if (found := _related(label, checked)) is not None]
    return types.Diagnostic(
        range=range_of(item, checked),
        message=_message(item, here=here),
        severity=SEVERITIES[item.severity],
        code=item.code,
        source="legoai",
        tags=[types.DiagnosticTag.Unnecessary] if here and item.slug.startswith(_UNNECESSARY) else None,
        related_information=labels or None,
    )


def range_of(item: Diagnostic, checked: Checked) -> types.Range:
    """Return the range of a diagnostic in its document."""
    document, span = checked.document, item.label.span
    if span.file == document.name:
        return document.positions.of(span)
    found = list(document.extended())
    place = place_of(span.file)
    names = [name for name, path in found if path == place] or [name for name, _ in found]
    return document.positions.of(names[0].span) if names else document.positions.range(0, 0)


def _message(item: Diagnostic, *, here: bool) -> str:
    """Return the message with its label, which a terminal shows under the text, and with its help."""
    text = message_of(item)
    if not here or not item.label.text:
        return text
    first, rest = text[: len(item.message)], text[len(item.message) :]
    return f"{first}\n{item.label.text}{rest}"


def _related(label: Label, checked: Checked) -> types.DiagnosticRelatedInformation | None:
    document, span = checked.document, label.span
    if span.file == document.name:
        return types.DiagnosticRelatedInformation(
            types.Location(document.uri, document.positions.of(span)), label.text or "here"
        )
    file = checked.files.get(span.file)
    if file is None:
        return None
    where = types.Location(uri_of(Path(span.file)), document.positions_of(file).of(span))
    return types.DiagnosticRelatedInformation(where, label.text or "here")


def files_beside(checked: Checked) -> Mapping[Path, PlanFile]:
    """The files that a document's plan extends."""
    return {place_of(name): file for name, file in checked.files.items() if name != checked.document.name}
