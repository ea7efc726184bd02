"""Turns character offsets of a text into spans."""

from __future__ import annotations

import re
from bisect import bisect_right

from legoai.specs.span import Span


class Lines:
    """A file's text and where its lines begin."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def span(self, start: int, end: int) -> Span:
        """The span of the characters from ``start`` up to ``end``."""
        line = bisect_right(self._starts, start)
        end_line = line if end <= start else bisect_right(self._starts, end)
        return Span(
            self.name,
            start,
            end,
            line,
            start - self._starts[line - 1] + 1,
            end_line,
            end - self._starts[end_line - 1] + 1,
        )

    def line(self, number: int) -> str:
        """The text of a line, which counts from 1, without its end."""
        start = self.offset(number)
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def offset(self, number: int) -> int:
        """The offset at which a line begins."""
        return self._starts[number - 1]

    def __len__(self) -> int:
        return len(self._starts)
