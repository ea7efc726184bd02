"""Draws the lines of a plan that a diagnostic speaks of, with marks and labels below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from legoai.dsl.frontend.text import Lines
from legoai.specs.span import Span
from legoai.specs.visible_text import visible_line

Style = Literal["", "gutter", "primary", "secondary", "message", "severity"]
Paint = Callable[[str, Style], str]
"""Colours a text; a plain one returns it as it is."""

WIDTH: Final = 120
"""Columns of a source line that are shown; a longer line is cut around its marks."""
_BEFORE: Final = 24
_TAB: Final = 4
_MOST_LINES: Final = 6
_ELLIPSIS: Final = "…"


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to underline, with `^` where it is the diagnostic's own and with `-` where it takes part."""

    span: Span
    text: str
    primary: bool

    @property
    def style(self) -> Style:
        """The colour of the mark and its label."""
        return "primary" if self.primary else "secondary"

    @property
    def sign(self) -> str:
        """What the mark is drawn with."""
        return "^" if self.primary else "-"


def draw(marks: Sequence[Mark], lines: Lines, gutter: int, paint: Paint) -> list[str]:
    """The marked lines of one file, each with its number in a column of ``gutter`` characters, and the marks below."""
    return _Drawing([_within(mark, lines) for mark in marks], lines, gutter, paint).rows()


def display_width(text: str) -> int:
    """The columns that a terminal takes for the text."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if character.isascii():
        return 1
    from unicodedata import category, east_asian_width

    if category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def _within(mark: Mark, lines: Lines) -> Mark:
    """The mark on lines that exist, and not on the end of a line alone."""
    span = mark.span
    last = len(lines)
    line, end_line, end_column = min(span.line, last), min(span.end_line, last), span.end_column
    if end_line > line and end_column == 1:
        end_line -= 1
        end_column = len(lines.line(end_line)) + 1
    return Mark(span._replace(line=line, end_line=end_line, end_column=end_column), mark.text, mark.primary)


class _Row:
    """Cells of one row below or before a source line."""

    def __init__(self) -> None:
        self.cells: list[tuple[str, Style]] = []

    def put(self, column: int, text: str, style: Style) -> None:
        self.cells.extend([(" ", "")] * (column + len(text) - len(self.cells)))
        for offset, character in enumerate(text):
            self.cells[column + offset] = character, style

    def painted(self, paint: Paint) -> str:
        pieces = []
        run, held = "", ""
        style: Style = ""
        for character, held in [*self.cells, ("", "end")]:
            if held != style:
                pieces.append(paint(run, style) if run and style else run)
                run, style = "", held  # type: ignore[assignment]
            run += character
        return "".join(pieces).rstrip()


class _Shown:
    """A source line as it is shown: tabs and control characters replaced, and cut around ``first`` if it is long."""

    def __init__(self, text: str, first: int) -> None:
        cells = []
        column = 0
        for character in text:
            cell = " " * (_TAB - column % _TAB) if character == "\t" else visible_line(character)
            cells.append(cell)
            column += display_width(cell)
        self.start, self.end = 0, len(cells)
        if column > WIDTH:
            self._cut(cells, first)
        self._cells = cells[self.start : self.end]
        self._cut_after = self.end < len(cells)
        self.text = (_ELLIPSIS if self.start else "") + "".join(self._cells) + (_ELLIPSIS if self._cut_after else "")

    def _cut(self, cells: list[str], first: int) -> None:
        """Leave out what is far from the character ``first``."""
        widths = [display_width(cell) for cell in cells]
        if sum(widths[: first + 1]) > WIDTH * 3 // 4:
            self.start = max(0, min(first, len(cells)) - _BEFORE)
        room = WIDTH
        self.end = self.start
        while self.end < len(cells) and room >= widths[self.end]:
            room -= widths[self.end]
            self.end += 1

    def column(self, offset: int) -> int:
        """The display column of the character at ``offset`` of the source line."""
        if offset < self.start:
            return 0
        inside = self._cells[: min(offset, self.end) - self.start]
        return (1 if self.start else 0) + sum(map(display_width, inside))

    def range(self, start: int, end: int) -> tuple[int, int]:
        """The display columns of a range of characters, which are at least one."""
        first = self.column(start)
        last = self.column(end) + (1 if end > self.end else 0)
        return first, max(last, first + 1)


class _Drawing:
    def __init__(self, marks: list[Mark], lines: Lines, gutter: int, paint: Paint) -> None:
        self.lines = lines
        self.gutter = gutter
        self.paint = paint
        self.single = [mark for mark in marks if mark.span.line == mark.span.end_line]
        self.long = sorted((mark for mark in marks if mark not in self.single), key=lambda mark: mark.span.start)
        self.margin = 2 * len(self.long)
        self.output: list[str] = []

    def rows(self) -> list[str]:
        previous = None
        for number in self._numbers():
            if previous is not None and number - previous == 2:
                self._line(number - 1)
            elif previous is not None and number - previous > 2:
                row = self._bars(previous + 1, after_start=True)
                cells = row.painted(self.paint)
                self.output.append(f"{self.paint('...', 'gutter')}{' ' * max(0, self.gutter) if cells else ''}{cells}")
            self._line(number)
            previous = number
        return self.output

    def _numbers(self) -> list[int]:
        numbers = {mark.span.line for mark in self.single}
        for mark in self.long:
            whole = list(range(mark.span.line, mark.span.end_line + 1))
            numbers.update(whole if len(whole) <= _MOST_LINES else [*whole[:3], *whole[-2:]])
        return sorted(numbers)

    def _line(self, number: int) -> None:
        marks = [mark for mark in self.single if mark.span.line == number]
        columns = [mark.span.column for mark in (*marks, *self.long) if mark.span.line == number]
        primary = [mark.span.column for mark in marks if mark.primary]
        text = self.lines.line(number)
        shown = _Shown(text, min(primary or columns or [1]) - 1)
        row = self._bars(number)
        opened = []
        for slot, mark in enumerate(self.long):
            if mark.span.line == number:
                if text[: mark.span.column - 1].strip():
                    opened.append((slot, mark))
                else:
                    row.put(2 * slot, "/", mark.style)
        before = row.painted(self.paint)
        filled = before + " " * (self.margin - len(row.cells) + _trailing(row)) if self.margin else ""
        self._emit(str(number), (filled + shown.text).rstrip())
        self._below(number, marks, shown)
        for slot, mark in opened:
            self._opening(number, slot, mark, shown)
        for slot, mark in enumerate(self.long):
            if mark.span.end_line == number:
                self._closing(number, slot, mark, shown)

    def _emit(self, number: str, content: str) -> None:
        head = self.paint(f"{number:>{self.gutter}} |", "gutter")
        self.output.append(f"{head} {content}" if content else head)

    def _bars(self, number: int, *, after_start: bool = False) -> _Row:
        """The bars of the long marks that pass the line, or the row below it."""
        row = _Row()
        for slot, mark in enumerate(self.long):
            begun = mark.span.line <= number if after_start else mark.span.line < number
            if begun and mark.span.end_line >= number:
                row.put(2 * slot, "|", mark.style)
        return row

    def _below(self, number: int, marks: list[Mark], shown: _Shown) -> None:
        """The marks of one line, and their labels: the last one's beside it, the others' hanging below."""
        if not marks:
            return
        placed = sorted(
            ((*shown.range(mark.span.column - 1, mark.span.end_column - 1), mark) for mark in marks),
            key=lambda item: (item[0], item[1], item[2].primary),
        )
        row = self._bars(number)
        for first, last, mark in sorted(placed, key=lambda item: item[2].primary):
            row.put(self.margin + first, mark.sign * (last - first), mark.style)
        beside = placed[-1]
        hanging = [item for item in placed if item[2].text]
        if beside[2].text and all(item[1] <= beside[0] for item in placed[:-1]):
            row.put(self.margin + beside[1] + 1, beside[2].text, beside[2].style)
            hanging.remove(beside)
        self._emit("", row.painted(self.paint))
        if hanging:
            self._emit("", self._connectors(number, hanging).painted(self.paint))
        while hanging:
            first, _, mark = hanging.pop()
            row = self._connectors(number, hanging)
            row.put(self.margin + first, mark.text, mark.style)
            self._emit("", row.painted(self.paint))

    def _connectors(self, number: int, hanging: list[tuple[int, int, Mark]]) -> _Row:
        row = self._bars(number)
        for first, _, mark in hanging:
            row.put(self.margin + first, "|", mark.style)
        return row

    def _opening(self, number: int, slot: int, mark: Mark, shown: _Shown) -> None:
        row = self._bars(number)
        column = self.margin + shown.column(mark.span.column - 1)
        row.put(2 * slot + 1, "_" * (column - 2 * slot - 1), mark.style)
        row.put(column, mark.sign, mark.style)
        self._emit("", row.painted(self.paint))

    def _closing(self, number: int, slot: int, mark: Mark, shown: _Shown) -> None:
        row = self._bars(number, after_start=True)
        column = self.margin + max(0, shown.range(0, mark.span.end_column - 1)[1] - 1)
        row.put(2 * slot, "|" + "_" * (column - 2 * slot - 1), mark.style)
        row.put(column, mark.sign, mark.style)
        if mark.text:
            row.put(column + 2, mark.text, mark.style)
        self._emit("", row.painted(self.paint))


def _trailing(row: _Row) -> int:
    """The blank cells at a row's end, which painting leaves out."""
    count = 0
    for character, _ in reversed(row.cells):
        if character != " ":
            break
        count += 1
    return count
