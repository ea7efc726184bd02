r"""Layout of a syntax tree as text: the one canonical layout of a plan.

The layout has no options. It is a function of the tree, of the comments, of where blank lines stand, and of whether a
block of one rule stood on one line; so laying it out again changes nothing.

- **Statements** begin in column 1, those of a variant two columns further in. A single space stands between the parts
  of a statement. In a run of one-line statements the parts behind the keywords begin in one column. `extends`,
  `minimize`, `maximize`, `variant`, `unset` and `solved` read as English and are not padded.
- **Rules** stand one to a line, indented by two, without commas. A block of one rule that stood on one line stays
  there, ``{ layers.* = inductor }``, where the whole statement fits.
- **Options, arguments and lists** stand on one line, separated by ``", "``, where the line fits; otherwise one to a
  line, indented by two, without commas. A comment between them also puts them one to a line. A line that is too long
  is broken at its block first, then at its brackets from left to right, and what is inside of brackets only where it
  is still too long.
- **Columns**: `=` is aligned in runs of rules, of options that stand one to a line, and of `let`; the comparison is
  aligned in runs of `require`. A run is ended by a blank line, by an item of several lines and by another kind of
  item, not by a comment line. A line that alignment would make too long stands out of it.
- **Comments** stay where they are: one on a line of its own stands before what it preceded, indented as that is; one
  behind code stands behind the same item, or behind the bracket that it followed, after two spaces. On consecutive
  lines of the same indentation such comments begin in one column. A second comment behind one item, which only a
  comma on a line of its own makes possible, gets a line of its own. A comment's text is kept but for blanks at its
  end.
- **Suppressions**: a suppression comment covers lines, and keeps covering the same. A statement in which the layout
  would change that stays as it is written, from its first character to its last.
- **Blank lines**: at most one, none at the beginning of the file, after an opening bracket and before a closing one.
  One newline ends the file.
- **Values**: numbers keep their text; strings are in double quotes with ``\" \\ \n \t`` escaped; ``name =
  value``; ``a + b``; ``-a``; ``auto in [1, 2] -> 2``; ``1..8``. Parentheses stand only where the tree needs them.
  Alternatives in paths are separated by ``", "``.

A line fits up to 100 columns, without its comment. What cannot be broken may be longer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from legoai.dsl.frontend.syntax import (
    AnyStatement,
    Argument,
    Arguments,
    Auto,
    Binary,
    Block,
    Boolean,
    Call,
    Comment,
    Let,
    ListValue,
    Name,
    Negation,
    Number,
    PlanFile,
    Range,
    Require,
    RuleLine,
    SolvedLine,
    Statement,
    String,
    Unset,
    Value,
    Variant,
)

LIMIT: Final = 100
"""The columns of a line, without its comment."""

_ENGLISH: Final = ("extends", "minimize", "maximize")
_BLANK_LINE: Final = re.compile(r"\n[ \t\r]*\n")
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
_SUM, _PRODUCT, _UNARY, _OPERAND = range(4)

_Item: TypeAlias = AnyStatement | RuleLine | Argument | Value


def quoted(text: str) -> str:
    """A text as a string of the language."""
    return f'"{"".join(_ESCAPES.get(character, character) for character in text)}"'


def format_plan(file: PlanFile, as_written: Collection[int] = ()) -> str:
    """Return the plan in the canonical layout, but for the statements that begin at the offsets ``as_written``.

    The file must have been read without errors: unreadable text is not in its tree, and would be lost.
    """
    rows = _Printer(file, as_written).rows(file.statements, 0, len(file.text) + 1, 0)
    return "".join(f"{line}\n" for line in _with_comments(rows))


def value_on_one_line(file: PlanFile, node: Value) -> str:
    """Return the text of a value: as it is written, or if that has several lines, on one line without comments."""
    text = file.text[node.span.start : node.span.end]
    return _Printer(file).flat(node) if "\n" in text else text


@dataclass(slots=True)
class _Line:
    """A line of the result; blank without text and comment."""

    depth: int
    text: str
    comment: str = ""

    def __str__(self) -> str:
        return "  " * self.depth + self.text


@dataclass(slots=True)
class _Group:
    """Brackets with their content: flat on one line, or broken with one item per line."""

    opening: str
    items: Sequence[_Item]
    closing: str
    start: int
    end: int
    must_break: bool
    can_break: bool


_Piece: TypeAlias = str | _Group


@dataclass(slots=True)
class _Entry:
    """An item of a sequence, or a comment on a line of its own."""

    item: _Item | Comment
    blank_before: bool
    comment: str = ""


@dataclass(slots=True)
class _Row:
    """An entry after layout: its lines, and the alignment key of its first line."""

    kind: str
    head: str
    lines: list[_Line]
    blank_before: bool

    @property
    def aligns(self) -> bool:
        return bool(self.kind and self.head) and len(self.lines) == 1


class _Printer:
    def __init__(self, file: PlanFile, as_written: Collection[int] = ()) -> None:
        self.text = file.text
        self.as_written = as_written
        self.comments = file.comments
        self.starts = [comment.span.start for comment in file.comments]

    def rows(self, items: Sequence[_Item], start: int, end: int, depth: int) -> list[_Line]:
        """The lines of a sequence that nothing encloses."""
        behind, lines = self._sequence(items, start, end, depth)
        assert not behind, f"a comment behind nothing: {behind!r}"
        return lines

    def _between(self, start: int, end: int) -> Sequence[Comment]:
        return self.comments[bisect_left(self.starts, start) : bisect_left(self.starts, end)]

    def _entries(self, items: Sequence[_Item], start: int, end: int) -> tuple[str, list[_Entry]]:
        """Return the items and comments between two positions, and the comment directly after the first."""
        entries: list[_Entry] = []
        behind = ""
        position = start
        for item in (*items, None):
            gap_end = end if item is None else item.span.start
            for index, comment in enumerate(self._between(position, gap_end)):
                if index or comment.alone:
                    entries.append(_Entry(comment, bool(entries) and self._blank(position, comment.span.start)))
                elif entries:
                    entries[-1].comment = comment.text.rstrip()
                else:
                    behind = comment.text.rstrip()
                position = comment.span.end
            if item is not None:
                entries.append(_Entry(item, bool(entries) and self._blank(position, item.span.start)))
                position = item.span.end
        return behind, entries

    def _blank(self, start: int, end: int) -> bool:
        return _BLANK_LINE.search(self.text, start, end) is not None

    def _sequence(self, items: Sequence[_Item], start: int, end: int, depth: int) -> tuple[str, list[_Line]]:
        behind, entries = self._entries(items, start, end)
        rows = [self._row(entry, depth) for entry in entries]
        _align(rows)
        lines: list[_Line] = []
        for row in rows:
            if row.blank_before:
                lines.append(_Line(0, ""))
            lines.extend(row.lines)
        return behind, lines

    def _row(self, entry: _Entry, depth: int) -> _Row:
        if isinstance(entry.item, Comment):
            return _Row("comment", "", [_Line(depth, entry.item.text.rstrip())], entry.blank_before)
        span = entry.item.span
        if span.start in self.as_written and isinstance(entry.item, AnyStatement):
            first, *rest = (line.rstrip() for line in self.text[span.start : span.end].split("\n"))
            lines = [_Line(depth, first), *(_Line(0, line) for line in rest)]
            lines[-1].comment = entry.comment
            return _Row("", "", lines, entry.blank_before)
        kind, head, pieces = self._item(entry.item)
        lines = self._lay([f"{head} " if head and pieces else head, *pieces], depth)
        lines[-1].comment = entry.comment
        return _Row(kind, head, lines, entry.blank_before)

    def _lay(self, pieces: list[_Piece], depth: int) -> list[_Line]:
        """Lay pieces out from the indentation ``depth`` on, breaking as few brackets as necessary."""
        broken = [isinstance(piece, _Group) and piece.must_break for piece in pieces]
        while (index := self._next_break(pieces, broken, depth)) is not None:
            broken[index] = True
        lines = []
        current = ""
        for piece, breaks in zip(pieces, broken, strict=True):
            if isinstance(piece, str):
                current += piece
            elif not breaks:
                current += self._flat_group(piece)
            else:
                behind, inside = self._sequence(piece.items, piece.start, piece.end, depth + 1)
                lines += [_Line(depth, current + piece.opening, behind), *inside]
                current = piece.closing
        return [*lines, _Line(depth, current.rstrip())]

    def _next_break(self, pieces: list[_Piece], broken: list[bool], depth: int) -> int | None:
        """The bracket to break next in the first line that is too long; None where nothing is to be done."""
        width = 2 * depth
        breakable: list[int] = []
        for index, (piece, breaks) in enumerate(zip(pieces, broken, strict=True)):
            if isinstance(piece, str):
                width += len(piece)
            elif not breaks:
                width += len(self._flat_group(piece))
                if piece.can_break:
                    breakable.append(index)
            else:
                width += len(piece.opening)
                if width > LIMIT and breakable:
                    break
                width, breakable = 2 * depth + len(piece.closing), []
        if width <= LIMIT or not breakable:
            return None
        blocks = [index for index in breakable if _opening(pieces[index]) == "{"]
        return (blocks or breakable)[0]

    def _item(self, item: _Item) -> tuple[str, str, list[_Piece]]:
        """Return the alignment key of the item, its first column, and the rest."""
        if isinstance(item, Statement):
            english = item.keyword.text in _ENGLISH
            return "" if english else "statement", item.keyword.text, self._statement(item)
        if isinstance(item, Let):
            return "let", f"let {item.name.text}", ["= ", *self._value(item.value)]
        if isinstance(item, Require):
            return "require", f"require {item.metric.text}", [f"{item.comparison} ", *self._value(item.bound)]
        if isinstance(item, SolvedLine):
            return "", "solved", [item.text]
        if isinstance(item, Unset):
            words = [item.what.text] + ([item.name.text] if item.name is not None else [])
            on = f" on {', '.join(axis.text for axis in item.axes)}" if item.axes else ""
            return "", "unset", [" ".join(words) + on]
        if isinstance(item, Variant):
            return "", "variant", [f"{item.name.text} ", self._variant(item)]
        if isinstance(item, RuleLine):
            return "rule", item.path.canonical, ["= ", *self._value(item.value)]
        if isinstance(item, Argument):
            if item.name is not None:
                return "option", item.name.text, ["= ", *self._value(item.value)]
            item = item.value
        return "", "", list(self._value(item))

    def _statement(self, statement: Statement) -> list[_Piece]:
        parts: list[list[_Piece]] = []
        if statement.subject is not None:
            parts.append(list(self._value(statement.subject)))
        if statement.axes:
            parts.append([f"on {', '.join(axis.text for axis in statement.axes)}"])
        if statement.options is not None:
            parts.append([self._arguments(statement.options)])
        if statement.block is not None:
            parts.append([self._block(statement.block)])
        pieces: list[_Piece] = []
        for part in parts:
            pieces += [" ", *part] if pieces else part
        return pieces

    def _block(self, block: Block) -> _Group:
        stays = len(block.rules) == 1 and block.span.line == block.span.end_line
        return self._group("{", block.rules, "}", block.span.start + 1, block.span.end, breaks=not stays)

    def _variant(self, variant: Variant) -> _Group:
        return self._group("{", variant.statements, "}", variant.name.span.end, variant.span.end, breaks=True)

    def _arguments(self, arguments: Arguments) -> _Group:
        return self._group("(", arguments.items, ")", arguments.span.start + 1, arguments.span.end)

    def _group(
        self, opening: str, items: Sequence[_Item], closing: str, start: int, end: int, *, breaks: bool = False
    ) -> _Group:
        commented = bool(self._between(start, end))
        can_break = bool(items) or commented
        return _Group(opening, items, closing, start, end, commented or (breaks and can_break), can_break)

    def _value(self, node: Value, level: int = _SUM) -> Iterator[_Piece]:
        """Yield the pieces of a value, in parentheses where precedence requires them."""
        own = _level(node)
        if own < level:
            yield "("
        if isinstance(node, Name):
            yield node.text
        elif isinstance(node, Number):
            yield node.text + node.unit
        elif isinstance(node, String):
            yield quoted(node.text)
        elif isinstance(node, Boolean):
            yield "true" if node.value else "false"
        elif isinstance(node, ListValue):
            yield self._group("[", node.items, "]", node.span.start + 1, node.span.end)
        elif isinstance(node, Call):
            yield node.name.text
            yield self._arguments(node.arguments)
        elif isinstance(node, Negation):
            yield "-"
            yield from self._value(node.operand, _UNARY)
        elif isinstance(node, Binary):
            yield from self._value(node.left, own)
            yield f" {node.operator} "
            yield from self._value(node.right, own + 1)
        else:
            yield from self._auto(node)
        if own < level:
            yield ")"

    def _auto(self, node: Auto) -> Iterator[_Piece]:
        yield "auto"
        if isinstance(node.domain, Range):
            yield " in "
            yield from self._value(node.domain.first)
            yield ".."
            yield from self._value(node.domain.last)
        elif node.domain is not None:
            yield " in "
            yield from self._value(node.domain)
        if node.answer is not None:
            yield " -> "
            yield from self._value(node.answer)

    def _flat_group(self, group: _Group) -> str:
        inside = ", ".join(map(self.flat, group.items))
        if group.opening == "{" and inside:
            inside = f" {inside} "
        return f"{group.opening}{inside}{group.closing}"

    def flat(self, item: _Item) -> str:
        """Return an item on one line, without the comments in it."""
        _, head, pieces = self._item(item)
        rest = "".join(piece if isinstance(piece, str) else self._flat_group(piece) for piece in pieces)
        return f"{head} {rest}" if head else rest


def _opening(piece: _Piece) -> str:
    return piece.opening if isinstance(piece, _Group) else ""


def _level(node: Value) -> int:
    if isinstance(node, Binary):
        return _SUM if node.operator in "+-" else _PRODUCT
    return _UNARY if isinstance(node, Negation) else _OPERAND


def _align(rows: Sequence[_Row]) -> None:
    """Pad the first columns in each run of one-line rows of a kind."""
    run: list[_Row] = []
    for row in rows:
        if row.kind == "comment":
            if row.blank_before:
                _pad(run)
                run = []
            continue
        if row.blank_before or not row.aligns or (run and run[0].kind != row.kind):
            _pad(run)
            run = []
        if row.aligns:
            run.append(row)
    _pad(run)


def _pad(run: Sequence[_Row]) -> None:
    """Align the second columns of a run, except in lines that would become too long."""
    if not run:
        return
    widest = max(len(row.head) for row in run)
    fitting = [row for row in run if len(str(row.lines[0])) + widest - len(row.head) <= LIMIT]
    width = max((len(row.head) for row in fitting), default=0)
    for row in fitting:
        line = row.lines[0]
        line.text = (row.head.ljust(width) + line.text[len(row.head) :]).rstrip()


def _with_comments(lines: Sequence[_Line]) -> Iterator[str]:
    """Yield the lines with their comments, aligned on consecutive lines of one indentation."""
    index = 0
    while index < len(lines):
        end = index + 1
        if lines[index].comment:
            while end < len(lines) and lines[end].comment and lines[end].depth == lines[index].depth:
                end += 1
            width = max(len(str(line)) for line in lines[index:end])
            yield from (f"{str(line).ljust(width)}  {line.comment}" for line in lines[index:end])
        else:
            yield str(lines[index]) if lines[index].text else ""
        index = end
