"""The `let` names of a plan: their values, and arithmetic over names and numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.kept import Kept
from legoai.dsl.frontend.syntax import Auto, Binary, Call, Let, Name, Negation, Number, Value
from legoai.specs.directives.kinds import Kind
from legoai.specs.record import Record
from legoai.specs.span import Decider, Span
from legoai.specs.units import UNITS

Answers = Mapping[Span, Value | None]
"""Answers that replace those in the text, by the span of the hole; None opens a hole that has an answer there."""

Quantity = tuple[float | int, str]
"""A number in the base unit of its dimension, and the dimension: bytes, seconds, fraction or number."""

_LARGEST: Final = 1e30
"""The largest number of the language: more than the bytes, seconds and operations of any training."""
MEASURES: Final = {
    "bytes": "an amount of memory",
    "seconds": "a time",
    "fraction": "a fraction",
    "number": "a plain number",
}
"""Names of dimensions for messages."""
_OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
}  # fmt: skip
_DIVISIONS: Final = ("/", "//", "%")
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"min": min, "max": max, "floor": math.floor}
"""Functions of numbers. `min` and `max` accept any number of values of one dimension, `floor` one plain number."""


class Definition(Record):
    """A `let`, and whether it was given on the command line."""

    let: Let
    decider: Decider


class Scope:
    """The names that `let` and `--set` define, and those that were used."""

    def __init__(
        self, definitions: dict[str, Definition], answers: Answers | None = None, kept: Kept | None = None
    ) -> None:
        self.names = definitions
        self._answers: Answers = answers or {}
        self.kept = kept
        self.asked: dict[Span, tuple[Auto, tuple[Kind, ...]]] = {}
        """The holes that were read, by span, each with the constraints of its uses."""
        self.used: set[str] = set()
        self._values: dict[str, Quantity | Diagnostic] = {}
        self._ends: dict[str, tuple[Value, Decider]] = {}

    def ask(self, hole: Auto, kinds: tuple[Kind, ...]) -> None:
        """Record that a hole was read, and the constraint of its use."""
        if hole.span in self.asked:
            kinds = (*self.asked[hole.span][1], *kinds)
        self.asked[hole.span] = hole, kinds

    def answer(self, hole: Auto) -> tuple[Value | None, bool]:
        """Return the answer of a hole, if it has one, and whether the answer is not in the text."""
        replaced = hole.span in self._answers
        if self.kept is not None:
            self.kept.note(hole.span)
        return (self._answers[hole.span] if replaced else hole.answer), replaced

    @property
    def is_set(self) -> bool:
        """Whether the command line gives a used name its value."""
        return any(self.names[name].decider == "command line" for name in self.used if name in self.names)

    def look_up(self, node: Value) -> tuple[Value, Decider]:
        """Return the value of ``node``: itself, or that of the `let` that it names; and its origin."""
        decider: Decider = "human"
        passed: dict[str, Definition] = {}
        while isinstance(node, Name) and node.text in self.names and node.text not in passed:
            self.used.add(node.text)
            if node.text in self._ends:
                node, decider = self._ends[node.text]
                break
            passed[node.text] = self.names[node.text]
            node = passed[node.text].let.value
        is_circular = self.circular(node)  # where a circle ends depends on where it is entered
        for name, definition in reversed(passed.items()):
            decider = "command line" if definition.decider == "command line" else decider
            if not is_circular:
                self._ends[name] = node, decider
        return node, decider

    def circular(self, node: Value) -> bool:
        """Whether ``node``, as :meth:`look_up` gave it, is a name that leads back to itself."""
        return isinstance(node, Name) and node.text in self.names

    def arithmetic(self, node: Value) -> Quantity | Diagnostic:
        """The value of a number, a name or a sum of them; a diagnostic where it has none."""
        try:
            return self._evaluate(node, ())
        except RecursionError:
            return rules.WrongArithmetic.at(
                node.span, "too many `let` names stand between this and its value", label="cannot be computed"
            )

    def _evaluate(self, node: Value, inside: tuple[str, ...]) -> Quantity | Diagnostic:
        if isinstance(node, Number):
            return _number(node)
        if isinstance(node, Negation):
            operand = self._evaluate(node.operand, inside)
            return operand if isinstance(operand, Diagnostic) else (-operand[0], operand[1])
        if isinstance(node, Binary):
            return self._binary(node, inside)
        if isinstance(node, Name):
            return self._named(node, inside)
        if is_function(node):
            return self._function(node, inside)
        return rules.WrongArithmetic.at(
            node.span, "arithmetic takes numbers and `let` names only", label="not a number"
        )

    def _named(self, node: Name, inside: tuple[str, ...]) -> Quantity | Diagnostic:
        definition = self.names.get(node.text)
        if definition is None:
            return rules.UnknownLet.at(
                node.span,
                f"no `let` defines `{node.text}`",
                label="unknown name",
                help=suggestion(node.text, tuple(self.names)),
            )
        if node.text in inside:
            circle = " → ".join([*inside[inside.index(node.text) :], node.text])
            return rules.CircularLet.at(
                definition.let.span,
                f"`{node.text}` needs its own value: {circle}",
                label="defined here",
                others=[Label(node.span, "needed here")],
            )
        self.used.add(node.text)
        if node.text not in self._values:
            self._values[node.text] = self._evaluate(definition.let.value, (*inside, node.text))
        return self._values[node.text]

    def _function(self, node: Call, inside: tuple[str, ...]) -> Quantity | Diagnostic:
        name = node.name.text
        values = []
        for item in node.arguments.items:
            value = self._evaluate(item.value, inside)
            if isinstance(value, Diagnostic):
                return value
            values.append(value)
        problem = _wrong_arguments(name, [value[1] for value in values])
        if any(item.name is not None for item in node.arguments.items):
            problem = "takes values without names"
        if problem is not None:
            return rules.WrongArithmetic.at(node.span, f"`{name}` {problem}", label="has no result")
        return FUNCTIONS[name](*(value[0] for value in values)), values[0][1]

    def _binary(self, node: Binary, inside: tuple[str, ...]) -> Quantity | Diagnostic:
        left, right = self._evaluate(node.left, inside), self._evaluate(node.right, inside)
        if isinstance(left, Diagnostic):
            return left
        if isinstance(right, Diagnostic):
            return right
        dimension = _dimension(node.operator, left[1], right[1])
        if dimension is None:
            words = {"+": "added to", "-": "subtracted from", "*": "multiplied by"}.get(node.operator, "divided by")
            pair = (right[1], left[1]) if node.operator in "+-" else (left[1], right[1])
            scales = node.operator in "+-" and right[1] == "fraction"
            return rules.WrongArithmetic.at(
                node.span,
                f"{MEASURES[pair[0]]} cannot be {words} {MEASURES[pair[1]]}",
                label=f"{left[1]} {node.operator} {right[1]}",
                help=["a fraction scales: `80GiB * 90%`"] if scales else [],
            )
        if node.operator in _DIVISIONS and right[0] == 0:
            return rules.WrongArithmetic.at(node.right.span, "division by zero", label="this is 0")
        try:
            value = _OPERATORS[node.operator](left[0], right[0])
        except OverflowError:
            value = _LARGEST * 2
        if not abs(value) <= _LARGEST:
            return rules.WrongArithmetic.at(node.span, "the result is too large", label="more than 1e30")
        return (int(value) if isinstance(value, float) and value.is_integer() else value), dimension


def is_function(node: object) -> TypeGuard[Call]:
    """Whether a value is a call of one of :data:`FUNCTIONS`, and not a treatment."""
    return isinstance(node, Call) and node.name.text in FUNCTIONS


def _wrong_arguments(function: str, dimensions: Sequence[str]) -> str | None:
    """Return why the function does not accept values of these dimensions."""
    if function == "floor":
        return None if dimensions == ["number"] else "takes one plain number"
    if not dimensions:
        return "needs at least one value"
    return (
        None
        if len(set(dimensions)) == 1
        else f"takes values of one kind, not {' and '.join(dict.fromkeys(dimensions))}"
    )


def _number(node: Number) -> Quantity | Diagnostic:
    text = node.text.replace("_", "")
    whole = text.isdigit()
    if float(text) > _LARGEST:
        return rules.WrongArithmetic.at(node.span, "the number is too large", label="more than 1e30")
    value = int(text) if whole else float(text)
    if not node.unit:
        return value, "number"
    dimension, size = UNITS[node.unit]
    if whole and isinstance(size, int):
        return int(text) * size, dimension
    from fractions import Fraction  # takes milliseconds, and few plans have such a number

    # Exact, and rounded once: `57%` is the number that `0.57` is, and no neighbour of it.
    scaled = Fraction(repr(value)) * Fraction(repr(size))
    return (int(scaled) if dimension == "bytes" and scaled.denominator == 1 else float(scaled)), dimension


def _dimension(sign: str, left: str, right: str) -> str | None:
    """Return the dimension of the result, or None where there is none. A fraction scales like a number."""
    scale = ("number", "fraction")
    if sign in "+-":
        return left if left == right else None
    if sign in ("//", "%"):
        same_kind = left == right or (sign == "//" and right == "number")
        return None if not same_kind else "number" if sign == "//" and left == right else left
    if left in scale and right in scale:
        return "fraction" if left == right == "fraction" and sign == "*" else "number" if left == right else "fraction"
    if sign == "*" and (left in scale or right in scale):
        return right if left in scale else left
    if sign == "/" and right in scale:
        return left
    return "number" if sign == "/" and left == right else None
