"""Leaves out diagnostics that only follow from another: what stands first is to be mended first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.specs.span import Span


def without_consequences(diagnostics: Iterable[Diagnostic], damaged: Sequence[Span]) -> list[Diagnostic]:
    """The diagnostics, each once, without those about names and values in text that could not be read.

    ``damaged`` are the statements with mistakes in their syntax. What such a statement seems to lack may stand on the
    line that could not be read.
    """
    found = list(dict.fromkeys(diagnostics))
    unread = [item.label.span for item in found if item.code.startswith("LP1")]
    return [item for item in found if not item.code.startswith("LP2") or not _follows(item, unread, damaged)]


def _follows(item: Diagnostic, unread: Sequence[Span], damaged: Sequence[Span]) -> bool:
    place = item.label.span
    lacks = item.code == "LP205" and any(_overlap(place, span) for span in damaged)
    return lacks or any(_overlap(place, span) for span in unread)


def _overlap(left: Span, right: Span) -> bool:
    return left.file == right.file and left.start < right.end and right.start < left.end
