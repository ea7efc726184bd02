"""Writer of Python text in the formatter's layout, with the plan line of every line.

A program consists of nodes: text that stays on one line, and calls, dictionaries and tuples that fit on one line or are
broken with one item per line. `ruff format` does the same with a trailing comma, so the text is already formatted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from legoai.specs.span import Span

WIDTH = 120
"""Characters in a line, comments included."""


@dataclass(frozen=True, slots=True)
class Note:
    """The plan's line that causes a piece of program; without a span, a value that no line of the plan gives."""

    span: Span | None = None

    @property
    def comment(self) -> str:
        """Return the trailing comment, without the path of the plan's folder, which differs between machines."""
        if self.span is None:
            return "  # default"
        return f"  # {on_one_line(PurePath(self.span.file).name)}:{self.span.line}"


@dataclass(frozen=True, slots=True)
class Item:
    """One argument of a call, entry of a dictionary or element of a tuple.

    ``prefix`` is the text before the value: `lr=`, `"wq": ` or nothing.
    """

    value: Node
    prefix: str = ""
    note: Note | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Items between brackets: a call (`AdamW(`…`)`), a dictionary or a tuple."""

    opening: str
    items: tuple[Item, ...]
    closing: str

    def inline(self) -> str | None:
        """Return the group on one line; None where an item has a comment of its own."""
        pieces = []
        for item in self.items:
            text = item.value if isinstance(item.value, str) else item.value.inline()
            if text is None or item.note is not None:
                return None
            pieces.append(item.prefix + text)
        comma = "," if self.opening == "(" and len(pieces) == 1 else ""
        return f"{self.opening}{', '.join(pieces)}{comma}{self.closing}"


Node = str | Group


def call(function: str, /, *positional: Node | Item, **keywords: Node | None) -> Group:
    """A call; a keyword whose value is None is left out."""
    items = [item if isinstance(item, Item) else Item(item) for item in positional]
    items += [Item(value, f"{name}=") for name, value in keywords.items() if value is not None]
    return Group(f"{function}(", tuple(items), ")")


def dictionary(entries: Sequence[tuple[str, Node, Note | None]]) -> Group:
    """A dictionary with texts as keys."""
    return Group("{", tuple(Item(value, f"{quoted(key)}: ", note) for key, value, note in entries), "}")


def sequence(items: Sequence[Node]) -> Group:
    """A tuple."""
    return Group("(", tuple(Item(item) for item in items), ")")


def listing(items: Sequence[Item]) -> Group:
    """A list."""
    return Group("[", tuple(items), "]")


def quoted(text: str) -> str:
    """A string literal, ASCII only; in double quotes unless single ones need fewer escapes."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    body = text.replace("\\", "\\\\").replace(quote, f"\\{quote}")
    escaped = "".join(
        character if " " <= character <= "~" else character.encode("unicode_escape").decode("ascii")
        for character in body
    )
    return f"{quote}{escaped}{quote}"


def on_one_line(text: str) -> str:
    """The text with escapes for what is not printable: a comment ends with its line."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def in_docstring(text: str) -> str:
    """The text as a part of a docstring, which it can neither end nor change by escapes of its own."""
    return on_one_line(text.replace("\\", "\\\\").replace('"', '\\"'))


def literal(value: object) -> str:
    """A number, truth value, string, None, or tuple of these as Python writes it."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list | tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(literal(item) for item in value)}{comma})"
    assert value is None or isinstance(value, bool | int | float), f"no literal for {type(value).__name__}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return re.sub(r"e([+-])0+", r"e\1", repr(value))


def data(value: object) -> Node:
    """Return the content of a JSON file as Python writes it; objects in the order of their keys."""
    if isinstance(value, Mapping):
        entries = sorted((str(key), item) for key, item in value.items())
        return Group("{", tuple(Item(data(item), f"{quoted(key)}: ") for key, item in entries), "}")
    if isinstance(value, list):
        return Group("[", tuple(Item(data(item)) for item in value), "]")
    return literal(value)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a function's body: an expression after a prefix (`return `, `policy = `)."""

    value: Node
    prefix: str = ""
    note: Note | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A `for`, `if` or `with` statement."""

    header: str
    body: tuple[Statement, ...]
    note: Note | None = None


Statement = Line | Loop


@dataclass(frozen=True, slots=True)
class Function:
    """A function at the top level of the program."""

    signature: str
    """`build_model() -> nn.Module`."""
    body: tuple[Statement, ...]
    note: Note | None = None
    docstring: tuple[str, ...] = ()
    """Its lines; empty ones between paragraphs."""


class Writer:
    """Collects lines of text, with the span of the plan that each comes from."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.spans: dict[int, Span] = {}

    def write(self, line: str = "", note: Note | None = None) -> None:
        """Add one line, with the note's comment behind it."""
        self.text.append(line + (note.comment if note is not None else ""))
        if note is not None and note.span is not None:
            self.spans[len(self.text)] = note.span

    def function(self, function: Function) -> None:
        """Add a function."""
        self.write(f"def {function.signature}:", function.note)
        if function.docstring:
            first, *others = function.docstring
            self.write(f'    """{first}' + ("" if others else '"""'))
            for line in others:
                self.write(f"    {line}" if line else "")
            if others:
                self.write('    """')
        self.body(function.body, 4)

    def body(self, statements: Sequence[Statement], indent: int) -> None:
        """Add statements at a depth of ``indent`` spaces."""
        for statement in statements:
            if isinstance(statement, Loop):
                self.write(f"{' ' * indent}{statement.header}:", statement.note)
                self.body(statement.body, indent + 4)
            else:
                self.node(statement.value, indent, statement.prefix, "", statement.note)

    def node(self, node: Node, indent: int, before: str, after: str, note: Note | None) -> None:
        """Add an expression: on one line if it fits, else with each item on a line of its own."""
        inline = node if isinstance(node, str) else node.inline()
        comment = note.comment if note is not None else ""
        margin = " " * indent
        if isinstance(node, str) or (
            inline is not None and (not node.items or len(margin + before + inline + after + comment) <= WIDTH)
        ):
            self.write(f"{margin}{before}{inline}{after}", note)
            return
        first = len(self.text) + 1
        self.write(f"{margin}{before}{node.opening}")
        for item in node.items:
            self.node(item.value, indent + 4, item.prefix, ",", item.note)
        self.write(f"{margin}{node.closing}{after}", note)
        if note is not None and note.span is not None:
            for number in range(first, len(self.text)):
                self.spans.setdefault(number, note.span)


class Imports:
    """The names that a program imports, written in the order that isort wants."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._names: dict[str, set[str]] = {}

    def module(self, module: str) -> None:
        """`import module`."""
        self._modules.add(module)

    def name(self, module: str, name: str) -> str:
        """`from module import name`; returns the name."""
        self._names.setdefault(module, set()).add(name)
        return name

    def lines(self) -> Iterator[str]:
        """The import statements: the standard library, other packages, then ours, a blank line between."""
        sections: dict[int, list[str]] = {}
        for module in sorted(self._modules, key=str.lower):
            sections.setdefault(_section(module), []).append(f"import {module}")
        for module in sorted(self._names, key=str.lower):
            sections.setdefault(_section(module), []).extend(_from_import(module, self._names[module]))
        for index, section in enumerate(sorted(sections)):
            if index:
                yield ""
            yield from sections[section]


_STANDARD_LIBRARY: Mapping[str, int] = {"functools": 0, "importlib": 0, "typing": 0}


def _section(module: str) -> int:
    top = module.partition(".")[0]
    return 2 if top == "legoai" else _STANDARD_LIBRARY.get(top, 1)


def _from_import(module: str, names: set[str]) -> list[str]:
    ordered = sorted(names, key=_order_of_name)
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= WIDTH:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in ordered), ")"]


def _order_of_name(name: str) -> tuple[int, str, str]:
    """Constants, then classes, then the rest, as isort orders them."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name.lower(), name
