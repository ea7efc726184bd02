"""Span of a value in a plan's text, and its origin: who decided it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from legoai.specs.record import Record


class Span(NamedTuple):
    """A half-open range of characters in one file.

    ``start`` and ``end`` are character offsets from the file's beginning; ``line`` and ``column`` count from 1.
    """

    file: str
    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """From the beginning of this span to the end of ``other``, which must lie in the same file."""
        return Span(self.file, self.start, other.end, self.line, self.column, other.end_line, other.end_column)

    def is_inside(self, other: Span) -> bool:
        """Whether this span is within another one, or equal to it."""
        return self.file == other.file and other.start <= self.start and self.end <= other.end

    def after(self) -> Span:
        """The empty span right behind this one."""
        return self._replace(start=self.end, line=self.end_line, column=self.end_column)

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

    @property
    def written(self) -> Span:
        """The span of a value that has no default, such as a rule or a budget."""
        assert self.span is not None, "it is always written by a person"
        return self.span


DEFAULT = Origin("default")
