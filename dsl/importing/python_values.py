"""Values of a config that is a Python function: what is known of them, and arithmetic."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from legoai.specs.span import Span

MOST_ITEMS: Final = 10_000
"""Items of a list, and letters of a text, up to which they are put together."""

_LARGEST: Final = 2**63
ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
COMPARED: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is not known.

    Attributes:
        why: reason, as the rest of a sentence about the value: `is …`.
    """

    why: str


@dataclass(slots=True)
class Made:
    """What a call of a class, or of a function that is not followed, returns.

    Attributes:
        name: of what is called, as the file writes it.
        span: of the call.
        arguments: without names.
        options: with names, and fields that were assigned later.
        spans: of the options.
        named: arguments with names, which no later assignment changes.
    """

    name: str
    span: Span
    arguments: list[Value] = field(default_factory=list)
    options: dict[str, Value] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    named: dict[str, Value] = field(default_factory=dict)

    @property
    def unread(self) -> Unread:
        """The call as a value that is not known."""
        return Unread(f"`{self.name}(…)`, which is not evaluated" if self.name else "not known")

    def put(self, name: str, value: Value, span: Span) -> None:
        """Set an option."""
        self.options[name], self.spans[name] = value, span


Value: TypeAlias = "int | float | bool | str | list[Value] | dict[Any, Value] | Made | Unread | None"


def combined(how: Callable[..., Any], *parts: Any, **named: Any) -> Value:
    """The result of an operation; unread where a part of it is."""
    for part in (*parts, *named.values()):
        if isinstance(part, Unread | Made):
            return part if isinstance(part, Unread) else part.unread
    found: Value = how(*parts, **named)
    return list(found) if isinstance(found, tuple) else found


def computed(op: ast.operator, left: Value, right: Value) -> Value:
    """A result of arithmetic on numbers, or a text or list put together of two.

    Raises:
        TypeError: it is of other types.
        ValueError: it is larger than a config has reason to be.
    """
    if not all(isinstance(one, int | float) for one in (left, right)) and not isinstance(op, ast.Add):
        raise TypeError("arithmetic is for numbers")
    found: Value = ARITHMETIC[type(op)](left, right)
    if isinstance(found, int) and abs(found) >= _LARGEST:
        raise ValueError("a number beyond 64 bits")
    if isinstance(found, str | list) and len(found) > MOST_ITEMS:
        raise ValueError("a text or list that is too long")
    return found


def items(value: Value) -> Iterator[Value]:
    """Yield a value, and those that it holds as a list or dictionary, at any depth."""
    yield value
    for one in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from items(one)


def is_config(value: Value) -> bool:
    """Whether a value is a config, or a part of one."""
    return isinstance(value, Made) and (not value.name or value.name.endswith("Config"))


def copied(value: Value) -> Value:
    """A copy whose parts are the same."""
    if isinstance(value, Made):
        return Made(value.name, value.span, [*value.arguments], {**value.options}, {**value.spans}, value.named)
    return copy.copy(value)


def loaded(target: ast.expr) -> ast.expr:
    """The expression that reads what an assignment names."""
    found = copy.deepcopy(target)
    for node in ast.walk(found):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            node.ctx = ast.Load()
    return found


def dotted(node: ast.expr) -> str | None:
    """The name of an expression that is one, with its dots."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=held, attr=name):
            before = dotted(held)
            return None if before is None else f"{before}.{name}"
    return None
