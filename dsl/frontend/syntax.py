"""The syntax tree of a plan's text, before names, units and defaults are resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypeAlias

from legoai.specs.record import Record
from legoai.specs.span import Span

_BLANKS: Final = re.compile(r"[ \t]*([{},]|\.\.)[ \t]*")


class Name(Record):
    """A bare word, perhaps with dots: a choice, a `let` name, a device, a module path."""

    text: str
    span: Span


class Number(Record):
    """A number with an optional unit; ``text`` is as written, without the unit."""

    text: str
    unit: str
    span: Span


class String(Record):
    """A quoted string, without its quotes and escapes."""

    text: str
    span: Span


class Boolean(Record):
    """`true` or `false`."""

    value: bool
    span: Span


class ListValue(Record):
    """A list in square brackets."""

    items: tuple[Value, ...]
    span: Span


class Argument(Record):
    """One item between parentheses: a value, with a name or by position."""

    name: Name | None
    value: Value
    span: Span


class Arguments(Record):
    """Everything between a pair of parentheses, which the span includes."""

    items: tuple[Argument, ...]
    span: Span


class Call(Record):
    """A name with arguments: `cosine(warmup = 200)`."""

    name: Name
    arguments: Arguments
    span: Span


class Binary(Record):
    """Arithmetic on two values: one of `+ - * / // %`."""

    operator: str
    left: Value
    right: Value
    span: Span


class Negation(Record):
    """A minus before a value."""

    operand: Value
    span: Span


class Range(Record):
    """The whole numbers from ``first`` to ``last``, both included: `1..8`."""

    first: Value
    last: Value
    span: Span


class Auto(Record):
    """A hole: `auto`, with a domain after `in`, and with the solver's answer after `->`."""

    domain: ListValue | Range | None
    answer: Value | None
    span: Span


Value: TypeAlias = Name | Number | String | Boolean | ListValue | Call | Binary | Negation | Auto


class PathText(Record):
    """A path pattern as written."""

    text: str
    span: Span

    @property
    def canonical(self) -> str:
        """The pattern with spaces only after the commas of alternatives."""
        return _BLANKS.sub(r"\1", self.text).replace(",", ", ")


class RuleLine(Record):
    """One line of a block: `path = treatment`."""

    path: PathText
    value: Value
    span: Span


class Block(Record):
    """The rules between a pair of braces, which the span includes."""

    rules: tuple[RuleLine, ...]
    span: Span


class Statement(Record):
    """`keyword [value] [on axis, …] [(option = value, …)] [{ path = treatment … }]`."""

    keyword: Name
    subject: Value | None
    axes: tuple[Name, ...]
    options: Arguments | None
    block: Block | None
    span: Span


class Let(Record):
    """`let name = value`."""

    name: Name
    value: Value
    span: Span


class Require(Record):
    """`require metric <= bound`.

    ``dimension`` is the one of the bound where it is written, as `merge` finds it; empty in the tree of a file.
    """

    metric: Name
    comparison: str
    bound: Value
    span: Span
    dimension: str = ""


class SolvedLine(Record):
    """The solver's line; ``text`` is what follows the keyword."""

    text: str
    span: Span


class Variant(Record):
    """`variant name { statements }`."""

    name: Name
    statements: tuple[AnyStatement, ...]
    span: Span


class Unset(Record):
    """`unset what [name] [on axis, …]`: removes a statement of a base plan, or of the plan of a variant.

    ``name`` is that of a figure, a `let` or a variant.
    """

    what: Name
    name: Name | None
    axes: tuple[Name, ...]
    span: Span


AnyStatement: TypeAlias = Statement | Let | Require | SolvedLine | Variant | Unset


class Comment(Record):
    """A comment from `#` to the end of its line; ``alone`` where nothing else is on the line."""

    text: str
    alone: bool
    span: Span


class PlanFile(Record):
    """One file: its name, its text, and the parsed tree.

    ``statements`` are in the order of the text, without unreadable ones. ``comments`` are beside the tree, also in
    order.
    """

    name: str
    text: str
    statements: tuple[AnyStatement, ...]
    comments: tuple[Comment, ...]


Node: TypeAlias = Value | Argument | Arguments | Range | PathText | RuleLine | Block | AnyStatement | Comment


def children(node: Node) -> Iterator[Node]:
    """The nodes directly inside ``node``, in the order of the text."""
    for field in node.fields_:
        value = getattr(node, field)
        for item in value if isinstance(value, tuple) and not isinstance(value, Span) else (value,):
            if isinstance(item, Record):
                yield item  # type: ignore[misc]


def holes_in(node: Node) -> Iterator[Auto]:
    """Each `auto` in a tree, with an answer or without, in the order of the text."""
    if isinstance(node, Auto):
        yield node
        return
    for child in children(node):
        yield from holes_in(child)


def same(left: object, right: object) -> bool:
    """Whether two trees are equal, apart from their spans and the spaces in their paths."""
    if isinstance(left, tuple) and isinstance(right, tuple) and not isinstance(left, Span):
        return len(left) == len(right) and all(map(same, left, right))
    if not isinstance(left, Record):
        return left == right
    if isinstance(left, PathText) and isinstance(right, PathText):
        return left.canonical == right.canonical
    return type(left) is type(right) and all(
        name == "span" or same(getattr(left, name), getattr(right, name)) for name in left.fields_
    )
