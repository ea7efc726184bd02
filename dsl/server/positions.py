"""Positions in a text as the protocol counts them, in lines and code units, from character offsets and back."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Final

from lsprotocol import types

from legoai.specs.span import Span

_END: Final = re.compile(r"\r\n|\r|\n")
"""Line endings of the protocol, fewer than those of Python's ``splitlines``."""


class Positions:
    """A text with the offsets of its lines.

    Args:
        text: the plan's text.
        encoding: of the client's character offsets: `utf-16` unless it chose another.
        mark: whether the client's text starts with a byte-order mark, which is not part of the plan's text.
    """

    def __init__(self, text: str, encoding: str = "utf-16", *, mark: bool = False) -> None:
        self.text = text
        ends = list(_END.finditer(text))
        self._starts = [0, *(match.end() for match in ends)]
        self._ends = [*(match.start() for match in ends), len(text)]
        self._units = 1 if encoding == "utf-32" or text.isascii() else 2 if encoding == "utf-16" else 0
        """Code units of a character: 1, 2 for one beyond the basic plane, or 0 for its bytes."""
        self._mark = 0 if not mark else 3 if encoding == "utf-8" else 1

    def position(self, offset: int) -> types.Position:
        """Return the position of a character; within a line ending, the end of the line."""
        return types.Position(*self.line_and_column(offset))

    def line_and_column(self, offset: int) -> tuple[int, int]:
        """Return the line and character of a position: of many at once cheaper than the class of the protocol."""
        line = bisect_right(self._starts, offset) - 1
        start = self._starts[line]
        return line, self._length(start, min(offset, self._ends[line])) + self._lead(line)

    def offset(self, position: types.Position) -> int:
        """Return the character at a position; the end of the line or text for a position beyond it."""
        if position.line >= len(self._starts):
            return len(self.text)
        start, end = self._starts[position.line], self._ends[position.line]
        wanted = max(0, position.character - self._lead(position.line))
        if self._units == 1:
            return min(start + wanted, end)
        offset = start
        while offset < end and wanted > 0:
            wanted -= self._length(offset, offset + 1)
            offset += wanted >= 0  # a position inside of a character is that of the character
        return offset

    def range(self, start: int, end: int) -> types.Range:
        """The range of the characters from ``start`` up to ``end``."""
        return types.Range(self.position(start), self.position(end))

    def of(self, span: Span) -> types.Range:
        """The range of a span of this text."""
        return self.range(span.start, span.end)

    def line_of(self, offset: int) -> int:
        """The line of a character, which counts from 0."""
        return bisect_right(self._starts, offset) - 1

    def line_end(self, line: int) -> int:
        """Return the end of a line, before its line ending."""
        return self._ends[min(line, len(self._ends) - 1)]

    @property
    def whole(self) -> types.Range:
        """The range of the whole text, with its mark."""
        return types.Range(types.Position(0, 0), self.position(len(self.text)))

    def _lead(self, line: int) -> int:
        return self._mark if line == 0 else 0

    def _length(self, start: int, end: int) -> int:
        if self._units == 1:
            return end - start
        piece = self.text[start:end]
        if self._units == 2:
            return len(piece) + sum(character > "\uffff" for character in piece)
        return len(piece.encode("utf-8", "surrogatepass"))


def replacement(positions: Positions, after: str) -> list[types.TextEdit]:
    """Return the edit from one text to another, of the changed lines only, so that cursors and folds stay."""
    before = positions.text
    if before == after:
        return []
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    first = _common(old, new)
    last = _common(old[first:][::-1], new[first:][::-1])
    start = sum(map(len, old[:first]))
    end = len(before) - sum(map(len, old[len(old) - last :]))
    text = "".join(new[first : len(new) - last])
    return [types.TextEdit(positions.range(start, end), text)]


def _common(left: list[str], right: list[str]) -> int:
    """Return the length of the common prefix of two lists."""
    return next((n for n, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
                min(len(left), len(right)))  # fmt: skip
