"""Path patterns with computed bounds: `layers.{0..n - 1}` where a `let` defines `n`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from legoai.dsl.diagnostics.codes.syntax import MalformedPath
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.paths import FOREIGN_RANGE, PathError, pattern
from legoai.dsl.frontend.syntax import Let, PathText, Value
from legoai.dsl.frontend.values.scope import MEASURES, Scope
from legoai.specs.record import replace
from legoai.specs.span import Span

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_HEAD: Final = "let end = "


def resolved_path(path: PathText, scope: Scope) -> str | Diagnostic:
    """Return the pattern with numbers as the bounds of its ranges; report a diagnostic where it cannot be read."""
    text = path.text
    ends = list(_computed(text))
    for offset, end in reversed(ends):
        place = part_of(path.span, offset, len(end))
        value = _value(end, place, scope)
        if isinstance(value, Diagnostic):
            return value
        text = f"{text[:offset]}{value}{text[offset + len(end) :]}"
    try:
        pattern(text)
    except PathError as error:
        # The computed text has other offsets than the written one.
        offset = 0 if ends else error.offset
        place = part_of(path.span, offset, len(path.text) - offset)
        return MalformedPath.at(place, error.message, label="the path cannot be read")
    return replace(path, text=text).canonical


def ends_of(path: PathText) -> Iterator[tuple[int, Value]]:
    """The ends of ranges that are computed, each with what its spans' offsets lack to be those in the path."""
    for offset, end in _computed(path.text):
        value = _parsed(end, path.span.file)
        if value is not None:
            yield offset - len(_HEAD), value


def _computed(text: str) -> Iterator[tuple[int, str]]:
    """The ends of ranges that are no plain numbers, each with its offset."""
    for match in _BRACES.finditer(text):
        first, dots, last = match[1].partition("..")
        if not dots or FOREIGN_RANGE.fullmatch(match[1]):
            continue
        for start, end in ((match.start(1), first), (match.start(1) + len(first) + len(dots), last)):
            word = end.strip()
            if word and not (word.isascii() and word.isdigit()):
                yield start + len(end) - len(end.lstrip()), word


def _value(text: str, place: Span, scope: Scope) -> int | Diagnostic:
    node = _parsed(text, place.file)
    if node is None:
        return MalformedPath.at(place, f"`{text}` is no end of a range", label="not a whole number")
    quantity = scope.arithmetic(node)
    if isinstance(quantity, Diagnostic):
        # Its spans are those of the text that was parsed here.
        return replace(quantity, label=replace(quantity.label, span=place), others=(), fix=None)
    value, dimension = quantity
    if dimension != "number" or value != int(value) or value < 0:
        shown = f"{value:g}" if dimension == "number" else MEASURES[dimension]
        return MalformedPath.at(place, f"the end of a range is a whole number, not {shown}", label=f"is {shown}")
    return int(value)


def _parsed(text: str, file: str) -> Value | None:
    parsed = parse(f"{_HEAD}{text}", file)
    statements = parsed.file.statements
    if parsed.diagnostics or len(statements) != 1 or not isinstance(statements[0], Let):
        return None
    return statements[0].value


def part_of(span: Span, offset: int, length: int) -> Span:
    """Return the span of a part of a path, which is on one line."""
    start, column = span.start + offset, span.column + offset
    return span._replace(start=start, end=start + length, column=column, end_column=column + length)
