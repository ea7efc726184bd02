"""Forms of values in the syntax tree: which kinds they could be of, and how a message calls them."""

from __future__ import annotations

import re
from typing import Final

from legoai.dsl.diagnostics.suggestion import closest
from legoai.dsl.frontend.syntax import Auto, Boolean, Call, ListValue, Name, Number, String, Value
from legoai.dsl.frontend.values.scope import is_function
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Calls
from legoai.specs.units import UNITS

_NUMERIC: Final = (kinds.Integer, kinds.Number, kinds.Size, kinds.Fraction)
_AMOUNT: Final = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?([A-Za-z]+|%)?")
_NUMBERS: Final = re.compile(r"\d+\.\d+")


def fits(node: Value, kind: kinds.Kind) -> bool:
    """Whether a value of this form could be of the kind."""
    if isinstance(kind, kinds.Either):
        return any(fits(node, item) for item in kind.kinds)
    if isinstance(node, Name):
        return isinstance(kind, kinds.Choice | kinds.Listed | Calls | kinds.ModulePath)
    if isinstance(node, Call) and not is_function(node):
        return isinstance(kind, Calls)
    if isinstance(node, String):
        return isinstance(kind, kinds.Text | kinds.ModulePath)
    if isinstance(node, ListValue):
        return isinstance(kind, kinds.ListOf)
    if isinstance(node, Boolean):
        return isinstance(kind, kinds.Boolean)
    return isinstance(kind, _NUMERIC)


def names_of(kind: kinds.Kind) -> tuple[str, ...]:
    """The names that a value of the kind may be, or may be called by."""
    if isinstance(kind, kinds.Choice):
        return kind.names
    if isinstance(kind, kinds.Listed):
        return kind.names()
    if isinstance(kind, Calls):
        return tuple(treatment.name for treatment in kind.treatments)
    if isinstance(kind, kinds.Either):
        return tuple(name for item in kind.kinds for name in names_of(item))
    return ()


def other_form(node: Value, kind: kinds.Kind) -> list[str]:
    """Help on a value in the form of another kind: `25MB` for `bytes(25MB)`, `"256"` for `256`, `"1f1b"` for `1F1B`."""
    if isinstance(node, String):
        return _unquoted(node.text, kind)
    if isinstance(node, Number) and is_path_of_numbers(node, kind):
        return [f'a path that reads as a number stands in quotes: `"{node.text}"`']
    if isinstance(kind, kinds.Either):
        return [line for item in kind.kinds for line in other_form(node, item)]
    if not isinstance(node, Number) or not isinstance(kind, Calls):
        return []
    dimension = UNITS[node.unit][0] if node.unit in UNITS else "number"
    wanted = {"bytes": kinds.Size, "number": kinds.Integer}.get(dimension)
    takes = [item for item in kind.treatments if wanted and item.options and isinstance(item.options[0].kind, wanted)]
    return [f"write `{item.name}({node.text}{node.unit})`" for item in takes]


def is_path_of_numbers(node: Value, kind: kinds.Kind) -> bool:
    """Whether a number such as `1.1` is the path of a module in nested lists, where a path is expected."""
    paths = isinstance(kind, kinds.Either) and any(isinstance(item, kinds.ModulePath) for item in kind.kinds)
    return paths and isinstance(node, Number) and _NUMBERS.fullmatch(node.text + node.unit) is not None


def _unquoted(text: str, kind: kinds.Kind) -> list[str]:
    numeric = any(
        isinstance(item, _NUMERIC) for item in (kind, *(kind.kinds if isinstance(kind, kinds.Either) else ()))
    )
    if numeric and _AMOUNT.fullmatch(text):
        return [f"a number stands without quotes: `{text}`"]
    meant = closest(text, names_of(kind)) if names_of(kind) else None
    return [f"did you mean `{meant}`, without quotes?"] if meant is not None else []


def computed(node: Value, value: float, dimension: str) -> str | None:
    """Describe a number that is computed, or named by a `let`, for a message; None for a literal."""
    if isinstance(node, Number) or dimension not in ("number", "fraction"):
        return None
    return f"`{value:g}`"


def describe_value(node: Value) -> str:
    """Describe a value for a message."""
    if isinstance(node, Name):
        return f"`{node.text}`"
    if isinstance(node, Call):
        return f"`{node.name.text}(…)`"
    if isinstance(node, String):
        return "a string"
    if isinstance(node, Boolean):
        return f"`{'true' if node.value else 'false'}`"
    if isinstance(node, ListValue):
        return "a list"
    if isinstance(node, Auto):
        return "`auto`"
    return f"`{node.text}{node.unit}`" if isinstance(node, Number) else "a number"


def short(expected: str) -> str:
    """Describe what was expected, where that is short enough for a label."""
    return expected if len(expected) <= 60 else "one of these"


def uncapitalised(sentence: str) -> str:
    """Return the sentence as a continuation of another one."""
    return sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() else sentence
