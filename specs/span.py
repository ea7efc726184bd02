"""Span of a value in a plan's text, and its origin: who decided it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from legoai.specs.record import Record


class Span(NamedTuple):
    """A half-open range of characters in one file.

    ``start`` and ``end`` are character offsets from the file's beginning; ``line`` and ``column`` count from 1.
    Byte offsets follow from the text (:meth:`byte_range`), since only the text knows its encoding.
    """

    file: str
    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int

    def byte_range(self, text: str) -> tuple[int, int]:
        """The range in bytes of ``text`` encoded as UTF-8."""
        first = len(text[: self.start].encode())
        return first, first + len(text[self.start : self.end].encode())

    def to(self, other: Span) -> Span:
        """From the beginning of this span to the end of ``other``, which must lie in the same file."""
        return Span(self.file, self.start, other.end, self.line, self.column, other.end_line, other.end_column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


Decider = Literal["human", "default", "solver", "command line", "standard layout"]


class Origin(Record):
    """The span of a value, and who decided it. A default has no span."""

    decider: Decider
    span: Span | None = None
    text: str | None = None
    """A number as it is written, without unit; None for anything else."""
    direct: bool = True
    """Whether the value is literal: not computed, and not the value of a `let`."""


DEFAULT = Origin("default")
