"""Suppression of consequential diagnostics: those that only follow from another one are left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from typing import Final

from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.specs.span import Span


class Spans:
    """Spans of several files, among which those that overlap another one are found without looking at each."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._by_file: dict[str, tuple[list[int], list[int]]] = {}
        for span in sorted(spans):
            starts, ends = self._by_file.setdefault(span.file, ([], []))
            starts.append(span.start)
            ends.append(max(span.end, ends[-1] if ends else 0))

    def overlap(self, span: Span) -> bool:
        """Whether any of them overlaps ``span``."""
        starts, ends = self._by_file.get(span.file, ([], []))
        before = bisect_left(starts, span.end)
        return before > 0 and ends[before - 1] > span.start


def without_consequences(diagnostics: Iterable[Diagnostic], damaged: Sequence[Span]) -> list[Diagnostic]:
    """Return the diagnostics, each once, without those about names and values in unreadable text.

    ``damaged`` are the statements with syntax errors. What such a statement seems to lack may be on the unreadable
    line.
    """
    found = list(dict.fromkeys(diagnostics))
    unread = Spans(item.label.span for item in found if item.code.startswith("LP1"))
    lacking = Spans(damaged)
    return [item for item in found if not item.code.startswith("LP2") or not _follows(item, unread, lacking)]


OF_THE_WHOLE: Final = ("LP703", "LP704", "LP713", "LP714")
"""Codes of consequences of most of a plan's statements together."""
_ABOUT_THE_PLAN: Final = ("LP202", "LP215", "LP221")
"""Codes of diagnostics about a whole plan, at its first statement."""
_CAUSES: Final = {
    "LP420": ("LP413",),
    "LP703": ("LP301", "LP704"),
    "LP704": ("LP301",),
    "LP713": ("LP301",),
    "LP714": ("LP301",),
    "LP820": ("LP301", "LP601", "LP715"),
}
"""Codes that add nothing to one of these: logits in the wrong layer, which leave DTensors, a mesh of the wrong size, a
batch that is not divisible, or the same fact with a stricter limit."""


def without_effects(
    diagnostics: Sequence[Diagnostic], statements: Sequence[Span], accepted: Container[Diagnostic]
) -> list[Diagnostic]:
    """Return the checks' diagnostics without consequences of an invalid name or path, or of another diagnostic.

    The meaning of a statement with such an error is not known, so only the error is reported.

    Args:
        diagnostics: of reading a plan and of its checks.
        statements: of the plan, each as a whole.
        accepted: those that the plan suppresses, which hide no others.
    """
    causes = [item for item in diagnostics if is_cause(item)]
    at_causes = Spans(cause.label.span for cause in causes)
    wrong = Spans(span for span in statements if at_causes.overlap(span))
    codes = {item.code for item in diagnostics if item not in accepted}
    return [
        item
        for item in diagnostics
        if item.code < "LP3"
        or not (
            (causes and item.code in OF_THE_WHOLE)
            or any(cause in codes for cause in _CAUSES.get(item.code, ()))
            or (item.code < "LP9" and any(wrong.overlap(label.span) for label in _places(item)))
        )
    ]


def is_cause(item: Diagnostic) -> bool:
    """Whether a diagnostic is about text, a name or a path, so that the meaning of its statement is not known."""
    return item.severity == "error" and "LP1" < item.code < "LP3" and item.code not in _ABOUT_THE_PLAN


def _places(item: Diagnostic) -> Iterable[Label]:
    return (item.label, *item.others)


def _follows(item: Diagnostic, unread: Spans, damaged: Spans) -> bool:
    place = item.label.span
    return (item.code == "LP205" and damaged.overlap(place)) or unread.overlap(place)
