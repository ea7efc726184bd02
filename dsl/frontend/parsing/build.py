"""Builds the syntax tree from the parser's tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, cast

from lark import Token, Tree

from legoai.dsl.diagnostics.codes import syntax as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.syntax import (
    AnyStatement,
    Argument,
    Arguments,
    Auto,
    Binary,
    Block,
    Boolean,
    Call,
    Let,
    ListValue,
    Name,
    Negation,
    Number,
    PathText,
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
from legoai.dsl.frontend.text import Lines
from legoai.specs.record import replace
from legoai.specs.span import Span
from legoai.specs.units import UNITS

_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)([A-Za-z]+|%)?")
_ESCAPES: Final = {"n": "\n", "t": "\t"}
_DEEPEST: Final = 64
"""Deepest nesting of values: far more than a person writes, and far less than Python's own stack."""


class NestedTooDeepError(Exception):
    """A value is nested too deeply; ``diagnostic`` reports it."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


class Builder:
    """Turns one parsed chunk into statements, and records errors that the grammar accepts."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.diagnostics: list[Diagnostic] = []
        self._depth = 0

    def statements(self, tree: Tree[Token]) -> list[AnyStatement]:
        """The statements under the parser's root.

        Raises:
            NestedTooDeepError: a value is nested deeper than any person would.
        """
        return [cast(AnyStatement, self._node(child)) for child in tree.children]

    def _node(self, tree: Any) -> Any:
        if self._depth > _DEEPEST:
            raise NestedTooDeepError(self._too_deep(tree))
        self._depth += 1
        node = _BUILDERS[tree.data](self, tree.children)
        self._depth -= 1
        return node

    def _too_deep(self, tree: Any) -> Diagnostic:
        while not isinstance(tree, Token):
            tree = tree.children[0]
        return rules.NestedTooDeep.at(
            self._span(tree), f"values are nested more than {_DEEPEST} deep", label="too deep here",
            help=["give the inner part a name with `let`"],
        )  # fmt: skip

    def _span(self, token: Token) -> Span:
        assert token.start_pos is not None
        assert token.end_pos is not None
        return self.lines.span(token.start_pos, token.end_pos)

    def _word(self, token: Token) -> Name:
        return Name(str(token), self._span(token))

    def _directive(self, parts: list[Any]) -> Statement:
        keyword = self._word(parts[0])
        last = keyword.span
        subject: Value | None = None
        axes: tuple[Name, ...] = ()
        options: Arguments | None = None
        block: Block | None = None
        for part in parts[1:]:
            if part.data == "on_axes":
                axes = tuple(self._word(token) for token in part.children[1:])
                last = axes[-1].span
            elif part.data == "arguments":
                options = self._node(part)
                last = options.span
            elif part.data == "block":
                block = self._node(part)
                last = block.span
            else:
                subject = self._node(part)
                last = subject.span
        return Statement(keyword, subject, axes, options, block, keyword.span.to(last))

    def _let(self, parts: list[Any]) -> Let:
        value: Value = self._node(parts[2])
        return Let(self._word(parts[1]), value, self._span(parts[0]).to(value.span))

    def _require(self, parts: list[Any]) -> Require:
        bound: Value = self._node(parts[3])
        return Require(self._word(parts[1]), str(parts[2]), bound, self._span(parts[0]).to(bound.span))

    def _variant(self, parts: list[Any]) -> Variant:
        body = tuple(self._node(part) for part in parts[3:-1])
        return Variant(self._word(parts[1]), body, self._span(parts[0]).to(self._span(parts[-1])))

    def _solved(self, parts: list[Any]) -> SolvedLine:
        text = str(parts[0]).rstrip()
        start = parts[0].start_pos
        return SolvedLine(text.removeprefix("solved").strip(), self.lines.span(start, start + len(text)))

    def _unset(self, parts: list[Any]) -> Unset:
        words = [self._word(part) for part in parts[1:] if isinstance(part, Token)]
        axes = tuple(self._word(token) for part in parts if not isinstance(part, Token) for token in part.children[1:])
        name = words[1] if words[1:] else None
        return Unset(words[0], name, axes, self._span(parts[0]).to((axes or words)[-1].span))

    def _block(self, parts: list[Any]) -> Block:
        lines = tuple(self._node(part) for part in parts[1:-1])
        return Block(lines, self._span(parts[0]).to(self._span(parts[-1])))

    def _rule(self, parts: list[Any]) -> RuleLine:
        path = PathText(str(parts[0]), self._span(parts[0]))
        value: Value = self._node(parts[1])
        return RuleLine(path, value, path.span.to(value.span))

    def _arguments(self, parts: list[Any]) -> Arguments:
        items = tuple(self._node(part) for part in parts[1:-1])
        return Arguments(items, self._span(parts[0]).to(self._span(parts[-1])))

    def _named(self, parts: list[Any]) -> Argument:
        name = self._word(parts[0])
        value: Value = self._node(parts[1])
        return Argument(name, value, name.span.to(value.span))

    def _positional(self, parts: list[Any]) -> Argument:
        value: Value = self._node(parts[0])
        return Argument(None, value, value.span)

    def _auto(self, parts: list[Any]) -> Auto:
        domain: ListValue | Range | None = None
        answer: Value | None = None
        last = self._span(parts[0])
        for part in parts[1:]:
            if isinstance(part, Token):
                continue
            if part.data == "domain":
                domain = self._domain(part.children)
                last = domain.span
            else:
                answer = cast(Value, self._node(part))
                last = answer.span
        return Auto(domain, answer, self._span(parts[0]).to(last))

    def _domain(self, parts: list[Any]) -> ListValue | Range:
        if len(parts) == 1:
            return cast(ListValue, self._node(parts[0]))
        first, last = self._node(parts[0]), self._node(parts[-1])
        return Range(first, last, first.span.to(last.span))

    def _binary(self, parts: list[Any]) -> Binary:
        left, right = self._node(parts[0]), self._node(parts[2])
        return Binary(str(parts[1]), left, right, left.span.to(right.span))

    def _negation(self, parts: list[Any]) -> Negation:
        operand = self._node(parts[1])
        return Negation(operand, self._span(parts[0]).to(operand.span))

    def _group(self, parts: list[Any]) -> Value:
        """Return the inner value, with a span that includes the parentheses, so that its owner ends after them."""
        return replace(cast(Value, self._node(parts[1])), span=self._span(parts[0]).to(self._span(parts[2])))

    def _number(self, parts: list[Any]) -> Number:
        span = self._span(parts[0])
        match = _NUMBER.fullmatch(str(parts[0]))
        assert match is not None, f"the grammar admits {parts[0]!r} as a number"
        text, unit = match[1], match[2] or ""
        if unit and unit not in UNITS:
            from legoai.dsl.diagnostics.vocabulary import our_number

            place = self.lines.span(span.end - len(unit), span.end)
            self.diagnostics.append(
                rules.UnknownUnit.at(
                    place,
                    f"there is no unit `{unit}`",
                    label="unknown unit",
                    help=our_number(text, unit)
                    or [*suggestion(unit, tuple(UNITS)), f"units are {' '.join(f'`{name}`' for name in UNITS)}"],
                )
            )
            unit = ""
        return Number(text, unit, span)

    def _string(self, parts: list[Any]) -> String:
        text = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), str(parts[0])[1:-1])
        return String(text, self._span(parts[0]))

    def _boolean(self, parts: list[Any]) -> Boolean:
        return Boolean(str(parts[0]) == "true", self._span(parts[0]))

    def _name(self, parts: list[Any]) -> Name:
        if parts[0] == "auto":  # the lexer reads it as a name where no hole is allowed
            self.diagnostics.append(
                rules.UnexpectedToken.at(
                    self._span(parts[0]),
                    "`auto` stands for a whole value and cannot be a part of one",
                    label="not inside of arithmetic",
                    help=["leave the whole value open, perhaps with a domain: `auto in [8, 16]`"],
                )
            )
        return self._word(parts[0])

    def _call(self, parts: list[Any]) -> Call:
        name = self._word(parts[0])
        arguments = self._arguments(parts[1].children)
        return Call(name, arguments, name.span.to(arguments.span))

    def _list(self, parts: list[Any]) -> ListValue:
        items = tuple(self._node(part) for part in parts[1:-1])
        return ListValue(items, self._span(parts[0]).to(self._span(parts[-1])))


_BUILDERS: Final[dict[str, Callable[[Builder, list[Any]], Any]]] = {
    name: getattr(Builder, f"_{name}")
    for name in (
        "directive", "let", "require", "variant", "solved", "unset", "block", "rule", "arguments", "named",
        "positional", "auto", "binary", "negation", "group", "number", "string", "boolean", "name", "call", "list",
    )
}  # fmt: skip
