"""Reads values of the syntax tree against the kinds that directives declare.

A value that is wrong becomes a diagnostic and a hole, so that rules which depend on it stay silent and all others go
on.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.diagnostics.suggestion import suggestion, translation
from legoai.dsl.frontend.syntax import (
    Auto,
    Binary,
    Boolean,
    Call,
    ListValue,
    Name,
    Node,
    Number,
    Range,
    String,
    Value,
    children,
)
from legoai.dsl.frontend.values.forms import (
    computed,
    describe_value,
    fits,
    is_path_of_numbers,
    names_of,
    other_form,
    short,
)
from legoai.dsl.frontend.values.scope import Scope, is_function
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Calls
from legoai.specs.directives.hole import Hole
from legoai.specs.record import replace
from legoai.specs.span import Decider, Origin, Span

_MISTAKE: Final = object()
"""Result of reading where a diagnostic was made."""


class ValueReader(ABC):
    """Reads values in the scope of one file's `let` names, and collects diagnostics."""

    def __init__(self, scope: Scope, diagnostics: list[Diagnostic]) -> None:
        self.scope = scope
        self.diagnostics = diagnostics
        self.decider: Decider = "human"
        """Origin of the values that are read, unless a `let` of the command line decides them."""
        self._direct = True
        """Whether a value is written where it is used, so that a fix there has no other effect."""
        self._valueless = ""
        """Name of an option that stands where a value is read, without one of its own."""

    def value(self, node: Value, kind: kinds.Kind) -> tuple[Any, Origin]:
        """Return the value of ``node`` as ``kind`` represents it, and its origin; a hole if undecided or invalid."""
        written = node
        node, decider = self.scope.look_up(node)
        if decider == "human":
            decider = self.decider
        outer, self._direct = self._direct, self._direct and node is written
        try:
            return self._found(node, decider, kind)
        finally:
            self._direct = outer

    def _found(self, node: Value, decider: Decider, kind: kinds.Kind) -> tuple[Any, Origin]:
        if isinstance(node, Auto):
            return self._auto(node, kind)
        if self.scope.circular(node):
            circle = self.scope.arithmetic(node)
            assert isinstance(circle, Diagnostic)
            self._report(circle)
            return Hole(), Origin(decider, node.span)
        value = self._read(node, kind)
        text = node.text if isinstance(node, Number) and not node.unit else None
        direct = self._direct and self._literal(node)
        return (Hole() if value is _MISTAKE else value), Origin(decider, node.span, text, direct)

    def _literal(self, node: Node) -> bool:
        """Whether no part of a value is computed or named by a `let`."""
        if isinstance(node, Binary) or is_function(node) or (isinstance(node, Name) and node.text in self.scope.names):
            return False
        return isinstance(node, Name | Number) or all(map(self._literal, children(node)))

    def _auto(self, node: Auto, kind: kinds.Kind) -> tuple[Any, Origin]:
        self.scope.ask(node, (kind,))
        domain = self._domain(node, kind)
        answer, replaced = self.scope.answer(node)
        if answer is None:
            return Hole(domain, node.span), Origin("human", node.span)
        # An answer that is only being tried is not in any text.
        place = node.span if replaced else answer.span
        value = self._read(self.scope.look_up(answer)[0], _counted(kind))
        if value is _MISTAKE:
            return Hole(domain, node.span), Origin("solver", place)
        if domain is not None and not _holds(domain, value):
            assert node.domain is not None
            self._report(
                rules.WrongDomain.at(
                    place, "the answer is not in the hole's domain", label="not one of the values allowed",
                    others=[Label(node.domain.span, "the domain")], help=["solve the plan again, or widen the domain"],
                )
            )  # fmt: skip
        return value, Origin("solver", place)

    def _domain(self, node: Auto, kind: kinds.Kind) -> tuple[Any, ...] | range | None:
        if node.domain is None:
            return None
        if isinstance(node.domain, ListValue):
            items = tuple(self.value(item, _counted(kind))[0] for item in node.domain.items)
            if not items:
                self._report(
                    rules.WrongDomain.at(node.domain.span, "the domain is empty", label="no value to choose from")
                )
                return None
            return None if any(isinstance(item, Hole) for item in items) else items
        first, last = (
            self._read(self.scope.look_up(end)[0], _counted(kind)) for end in (node.domain.first, node.domain.last)
        )
        if first is _MISTAKE or last is _MISTAKE:
            return None
        if type(first) is not int or type(last) is not int or first > last:
            self._report(
                rules.WrongDomain.at(
                    node.domain.span,
                    "a range needs two whole numbers, the smaller first",
                    label="the larger number is first" if type(first) is type(last) is int else "not whole numbers",
                )
            )
            return None
        return range(first, last + 1)

    def _read(self, node: Value | Range, kind: kinds.Kind) -> Any:
        return _READERS[type(kind)](self, node, kind)

    def _report(self, diagnostic: Diagnostic) -> Any:
        self.diagnostics.append(diagnostic)
        return _MISTAKE

    def _wrong(self, node: Value, kind: kinds.Kind, found: str | None = None, help: Sequence[str] = ()) -> Any:
        expected = kind.describe()
        return self._report(
            rules.WrongValue.at(
                node.span,
                f"expected {expected}, found {found or describe_value(node)}",
                label=f"not {short(expected)}",
                help=help or other_form(node, kind),
            )
        )

    def _choice(self, node: Value, kind: kinds.Choice | kinds.Listed) -> Any:
        names = kind.names if isinstance(kind, kinds.Choice) else kind.names()
        if isinstance(node, Name):
            if node.text in names:
                return node.text
            return self._unknown_name(node, names, kind)
        if isinstance(node, String) and node.text not in names and (help := self._meant(node.text, names, kind)):
            return self._report(
                rules.WrongValue.at(
                    node.span,
                    f"expected {kind.describe()}, found a string",
                    label="names stand without quotes",
                    help=help,
                )
            )
        if isinstance(node, String) and node.text in names:
            return self._report(
                rules.WrongValue.at(
                    node.span, "a name stands without quotes", label=f"write `{node.text}`",
                    fix=self._fix(node.span, node.text, safe=True),
                )
            )  # fmt: skip
        return self._wrong(node, kind)

    def _fix(self, span: Span, text: str, *, safe: bool) -> Fix | None:
        """Return the fix that writes ``text`` at ``span``, unless that is a `let`'s value, which others may use."""
        return (
            Fix(f"write `{text}`", (Edit(span, text),), safe=safe) if self._direct and self.decider == "human" else None
        )

    def _unknown_name(self, node: Name | Call, names: tuple[str, ...], kind: kinds.Kind) -> Any:
        name = node if isinstance(node, Name) else node.name
        help = self._meant(name.text, names, kind)
        meant = help[0].split("`")[1] if help and help[0].startswith("did you mean") else None
        return self._report(
            rules.UnknownName.at(
                name.span, f"`{name.text}` is not a legal value here", label="unknown name",
                help=[*help, f"expected {kind.describe()}"],
                fix=self._fix(name.span, meant, safe=False) if meant is not None else None,
            )
        )  # fmt: skip

    def _meant(self, word: str, names: tuple[str, ...], kind: kinds.Kind) -> list[str]:
        """Return help on a word that is none of ``names``."""
        if isinstance(kind, kinds.Listed) and kind.noun == "a model":
            from legoai.dsl.diagnostics.model_names import our_model

            if ours := our_model(word):
                return [f"did you mean `{ours}`?"]
            if "/" in word:
                return translation("hub", names)
        return translation(word, names)

    def _integer(self, node: Value, kind: kinds.Integer) -> Any:
        if kind.rest and isinstance(node, Name) and node.text == kinds.REST:
            return kinds.REST
        value, dimension = self._arithmetic(node, kind)
        if value is _MISTAKE:
            return _MISTAKE
        if dimension != "number" or value != int(value):
            return self._wrong(node, kind, computed(node, value, dimension))
        if (kind.minimum is not None and value < kind.minimum) or (kind.maximum is not None and value > kind.maximum):
            rest = [f"the devices that the other axes leave are `{kinds.REST}`"] if kind.rest and value == -1 else []
            return self._wrong(node, kind, str(int(value)), rest)
        return int(value)

    def _number(self, node: Value, kind: kinds.Number) -> Any:
        value, dimension = self._arithmetic(node, kind)
        if value is _MISTAKE:
            return _MISTAKE
        inside = (
            (kind.minimum is None or value >= kind.minimum)
            and (kind.maximum is None or value <= kind.maximum)
            and (kind.above is None or value > kind.above)
            and (kind.below is None or value < kind.below)
        )
        if dimension not in ("number", "fraction") or not inside:
            return self._wrong(node, kind, computed(node, value, dimension))
        return float(value)

    def _size(self, node: Value, kind: kinds.Size) -> Any:
        value, dimension = self._arithmetic(node, kind)
        if value is _MISTAKE:
            return _MISTAKE
        if dimension != "bytes" or value < kind.minimum:
            return self._wrong(node, kind, None if dimension == "bytes" else "a number without a unit of memory")
        return round(value)

    def _fraction(self, node: Value, kind: kinds.Fraction) -> Any:
        value, dimension = self._arithmetic(node, kind)
        if value is _MISTAKE:
            return _MISTAKE
        if dimension not in ("number", "fraction") or not 0 <= value <= 1:
            return self._wrong(node, kind, computed(node, value, dimension))
        return float(value)

    def _arithmetic(self, node: Value, kind: kinds.Kind) -> tuple[Any, str]:
        if isinstance(node, Name | String | Boolean | ListValue | Call | Auto) and not is_function(node):
            if isinstance(node, Name) and "." not in node.text:
                legal = tuple(self.scope.names)
                help = suggestion(node.text, legal) or [f"`let {node.text} = …` would define it"]
                if node.text == self._valueless:
                    help = [f"an option is given with its value: `{node.text} = …`"]
                return self._report(
                    rules.UnknownLet.at(
                        node.span, f"expected {kind.describe()}, and no `let` defines `{node.text}`",
                        label="unknown name",
                        help=help,
                    )
                ), ""  # fmt: skip
            return self._wrong(node, kind), ""
        result = self.scope.arithmetic(node)
        if isinstance(result, Diagnostic):
            return self._report(result), ""
        return result

    def _boolean(self, node: Value, kind: kinds.Boolean) -> Any:
        if isinstance(node, Boolean):
            return node.value
        if isinstance(node, Name) and node.text.lower() in ("true", "false", "yes", "no", "on", "off"):
            meant = "true" if node.text.lower() in ("true", "yes", "on") else "false"
            return self._report(
                rules.WrongValue.at(
                    node.span, f"expected `true` or `false`, found `{node.text}`", label="not a truth value",
                    help=[f"did you mean `{meant}`?"],
                    fix=self._fix(node.span, meant, safe=True),
                )
            )  # fmt: skip
        return self._wrong(node, kind)

    def _text(self, node: Value, kind: kinds.Text) -> Any:
        if isinstance(node, String):
            return node.text if re.fullmatch(kind.pattern, node.text) else self._wrong(node, kind, f'"{node.text}"')
        word = node.text if isinstance(node, Name) else f"{node.text}{node.unit}" if isinstance(node, Number) else None
        return self._wrong(node, kind, help=[f'in quotes: `"{word.lower()}"`'] if word else [])

    def _path(self, node: Value, kind: kinds.ModulePath) -> Any:
        return node.text if isinstance(node, Name | String) else self._wrong(node, kind)

    def _list(self, node: Value, kind: kinds.ListOf) -> Any:
        if not isinstance(node, ListValue):
            return self._wrong(node, kind)
        if kind.length is not None and len(node.items) != kind.length:
            return self._wrong(node, kind, f"a list of {len(node.items)}")
        return tuple(self.value(item, kind.item)[0] for item in node.items)

    @abstractmethod
    def _calls(self, node: Value, kind: Calls) -> Any:
        """Read a treatment or algorithm with its arguments."""

    def _either(self, node: Value, kind: kinds.Either) -> Any:
        """Read with the first kind that accepts the value's form; names may be of any kind that accepts names."""
        fitting = [item for item in kind.kinds if fits(node, item)]
        if not fitting or is_path_of_numbers(node, kind):
            return self._wrong(node, kind)
        if len(fitting) == 1:
            return self._read(node, fitting[0])
        if self._is_one_or_all(node, fitting):
            return self._report(
                rules.WrongValue.at(
                    node.span, f"{describe_value(node)} could be the number 1 or the fraction 100%",
                    label="ambiguous", help=["write `1` or `100%`"],
                )
            )  # fmt: skip
        trials: list[list[Diagnostic]] = []
        kept = self.diagnostics
        for item in fitting:
            self.diagnostics = []
            value = self._read(node, item)
            trials.append(self.diagnostics)
            self.diagnostics = kept
            if value is not _MISTAKE:
                kept.extend(trials[-1])
                return value
        if isinstance(node, Name | Call):
            return self._unknown_name(node, tuple(name for item in fitting for name in names_of(item)), kind)
        kept.extend(trials[0])
        return _MISTAKE

    def _is_one_or_all(self, node: Value, fitting: list[kinds.Kind]) -> bool:
        """Whether it is `1.0`, where `1` is one of many, and `0.99` nearly all of them."""
        if not {kinds.Integer, kinds.Fraction} <= {type(item) for item in fitting}:
            return False
        found = self.scope.arithmetic(node)
        return not isinstance(found, Diagnostic) and found == (1, "number") and isinstance(found[0], float)


_READERS: Final = cast(
    Mapping[type[kinds.Kind], Callable[[ValueReader, Any, Any], Any]],
    {
        kinds.Choice: ValueReader._choice,
        kinds.Listed: ValueReader._choice,
        kinds.Integer: ValueReader._integer,
        kinds.Number: ValueReader._number,
        kinds.Size: ValueReader._size,
        kinds.Fraction: ValueReader._fraction,
        kinds.Boolean: ValueReader._boolean,
        kinds.Text: ValueReader._text,
        kinds.ModulePath: ValueReader._path,
        kinds.ListOf: ValueReader._list,
        Calls: lambda reader, node, kind: reader._calls(node, kind),
        kinds.Either: ValueReader._either,
    },
)


def _holds(domain: tuple[Any, ...] | range, value: object) -> bool:
    """Whether a domain has a value."""
    # A range compares a value of another type with each of its members.
    return value in domain if isinstance(value, int) or not isinstance(domain, range) else False


@cache
def _counted(kind: kinds.Kind) -> kinds.Kind:
    """Return the kind without `rest`, which cannot be a choice or an answer."""
    return replace(kind, rest=False) if isinstance(kind, kinds.Integer) else kind
