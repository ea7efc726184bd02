"""Expansion of a plan's defaults, so that a reader sees every decision: the output of ``legoai fmt --expand``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend.arguments import Reader, flag_of
from legoai.dsl.frontend.layouts import layout_named, with_rules
from legoai.dsl.frontend.resolve import Resolution
from legoai.dsl.frontend.scope import Scope
from legoai.dsl.frontend.syntax import (
    AnyStatement,
    Argument,
    Arguments,
    Block,
    Boolean,
    Call,
    ListValue,
    Name,
    Negation,
    Number,
    PlanFile,
    Statement,
    String,
    Value,
    Variant,
)
from legoai.specs.directives import DEFAULTED, FAMILIES, family
from legoai.specs.directives import kinds as kind_of
from legoai.specs.directives.base import Calls, Declared, Directive, Option, Treatment
from legoai.specs.record import replace
from legoai.specs.span import Span
from legoai.specs.units import format_bytes

_EXPONENT: Final = re.compile(r"e\+?(-?)0*")


def expand(resolution: Resolution) -> str:
    """Return the plan's text in the canonical layout with missing options and statements; still the same plan.

    Statements that have defaults are added at the end, unless a base plan states them. A default that is derived from
    the rest of the plan, such as the number of stages, has no value of its own and is not written.
    """
    file = resolution.file
    writer = _Writer(resolution)
    statements = [writer.statement(item) for item in file.statements]
    decided = {item.keyword.text for item in resolution.statements if isinstance(item, Statement)}
    # A blank line between the plan and the additions.
    text = file.text + "\n\n"
    end = Span(file.name, len(text), len(text), 1, 1, 1, 1)
    for keyword in DEFAULTED:
        if keyword not in decided:
            statements.append(writer.missing(keyword, end))
    return format_plan(PlanFile(file.name, text, tuple(statements), file.comments))


def written_out(statement: Statement, resolution: Resolution) -> str | None:
    """Return a statement with the rules of the standard layout that it names; None where it names no known one.

    Args:
        statement: of the plan's own file, without syntax errors.
        resolution: of the plan.
    """
    if statement.keyword.text not in FAMILIES:
        return None
    full = _Writer(resolution).with_layout(statement, family(statement.keyword.text))
    if full is statement:
        return None
    file, span = resolution.file, statement.span
    inside = tuple(comment for comment in file.comments if span.start <= comment.span.start < span.end)
    return format_plan(PlanFile(file.name, file.text, (full,), inside)).rstrip("\n")


class _Writer:
    """Adds defaults to nodes. Additions get the spans where they would be written: comments keep their neighbours."""

    def __init__(self, resolution: Resolution) -> None:
        self.resolution = resolution
        self.scope = resolution.scope

    def statement(self, statement: AnyStatement) -> AnyStatement:
        """The statement with the options that it leaves to their defaults."""
        if isinstance(statement, Variant):
            return replace(statement, statements=tuple(map(self.statement, statement.statements)))
        if not isinstance(statement, Statement) or statement.keyword.text not in FAMILIES:
            return statement
        declared = family(statement.keyword.text)
        statement = self.with_layout(statement, declared)
        block = None if statement.block is None else self._block(statement.block, declared)
        subject, options = statement.subject, statement.options
        if declared.subject is not None and declared.subject_holds_options:
            given = frozenset({declared.subject})
            if isinstance(subject, Name | Call) and not self._is_let(subject):
                subject = self._call(subject, declared, given)
            return replace(statement, subject=subject, block=block)
        given = frozenset()
        if declared.subject is not None:
            item = declared.option(declared.subject)
            if subject is None:
                subject = _default(item, _after(statement.keyword.span)) if not item.required else None
            else:
                subject = self._value(subject, item.kind)
            given = frozenset({declared.subject})
        options = self._arguments(options, declared, given, _after(statement.span))
        return replace(statement, subject=subject, options=options, block=block)

    def with_layout(self, statement: Statement, declared: type[Directive]) -> Statement:
        """The statement with the rules of its standard layout, if it names one."""
        plan = self.resolution.plan
        if plan is None or layout_named(statement, declared) is None:
            return statement
        start = statement.block.span.start + 1 if statement.block is not None else statement.span.end
        place = statement.span._replace(start=start, end=start)
        full = with_rules(
            statement, declared, plan.model, self.resolution.directory, Reader(self.scope, []), place=place
        )
        return statement if full is None else full

    def missing(self, keyword: str, place: Span) -> Statement:
        """A statement with nothing but defaults."""
        return _bare(self.statement(Statement(Name(keyword, place), None, (), None, None, place)))

    def _is_let(self, node: Name | Call) -> bool:
        return isinstance(node, Name) and node.text in self.scope.names

    def _block(self, block: Block, declared: type[Directive]) -> Block:
        if declared.treatments is None:
            return block
        kind = declared.treatments
        return replace(block, rules=tuple(replace(rule, value=self._value(rule.value, kind)) for rule in block.rules))

    def _value(self, node: Value, kind: kind_of.Kind) -> Value:
        """The value with the defaults of every treatment in it."""
        if isinstance(node, ListValue):
            items = [item.item for item in _each(kind) if isinstance(item, kind_of.ListOf)]
            return replace(node, items=tuple(self._value(item, items[0]) for item in node.items)) if items else node
        if not isinstance(node, Name | Call) or self._is_let(node):
            return node
        word = node.text if isinstance(node, Name) else node.name.text
        if isinstance(node, Name) and any(
            isinstance(item, kind_of.Choice) and word in item.names for item in _each(kind)
        ):
            return node
        for item in _each(kind):
            if isinstance(item, Calls):
                for treatment in item.treatments:
                    if treatment.name == word:
                        return self._call(node, treatment, frozenset())
        return node

    def _call(self, node: Name | Call, declared: type[Declared], given: frozenset[str]) -> Value:
        name, arguments = (node, None) if isinstance(node, Name) else (node.name, node.arguments)
        full = self._arguments(arguments, declared, given, _after(name.span))
        return node if full is None else Call(name, full, node.span)

    def _arguments(
        self, arguments: Arguments | None, declared: type[Declared], given: frozenset[str], place: Span
    ) -> Arguments | None:
        """Return the arguments with missing ones added; ``given`` are fields that are given elsewhere."""
        items = arguments.items if arguments is not None else ()
        kinds = dict(_matched(items, declared, given, self.scope))
        old = [self._argument(item, kinds.get(id(item))) for item in items]
        held = {option.field for option in kinds.values()}
        end = place if arguments is None else _before_end(arguments.span)
        new = [
            Argument(Name(option.name, end), value, end)
            for option in declared.options
            if option.field not in held | given and (value := _default(option, end)) is not None
        ]
        if arguments is None and not new:
            return None
        return Arguments((*old, *new), place if arguments is None else arguments.span)

    def _argument(self, argument: Argument, option: Option | None) -> Argument:
        return argument if option is None else replace(argument, value=self._value(argument.value, option.kind))


def _matched(
    items: Iterable[Argument], declared: type[Declared], given: frozenset[str], scope: Scope
) -> Iterator[tuple[int, Option]]:
    """Return the option that each argument gives, by name or position, or as a bare name."""
    positional = [option for option in declared.options if option.field not in given]
    for index, item in enumerate(items):
        flag = flag_of(item, declared, scope)
        if flag is not None:
            yield id(item), flag
        elif item.name is None:
            if index < len(positional):
                yield id(item), positional[index]
        else:
            yield from ((id(item), option) for option in declared.options if option.name == item.name.text)


def _each(kind: kind_of.Kind) -> Iterator[kind_of.Kind]:
    if isinstance(kind, kind_of.Either):
        for item in kind.kinds:
            yield from _each(item)
    else:
        yield kind


def _default(option: Option, place: Span) -> Value | None:
    """Return the default as it is written; None where there is none, or none that can be written."""
    if option.required or option.default is None:
        return None
    in_bytes = any(isinstance(kind, kind_of.Size) for kind in _each(option.kind))
    quoted = not any(isinstance(kind, kind_of.Choice | kind_of.Listed) for kind in _each(option.kind))
    return _written(option.default, place, in_bytes=in_bytes, quoted=quoted)


def _written(value: Any, place: Span, *, in_bytes: bool, quoted: bool) -> Value:
    if isinstance(value, bool):
        return Boolean(value, place)
    if isinstance(value, Treatment):
        arguments = [
            Argument(Name(option.name, place), item, place)
            for option in value.options
            if (item := _default(option, place)) is not None
        ]
        name = Name(value.name, place)
        return Call(name, Arguments(tuple(arguments), place), place) if arguments else name
    if isinstance(value, tuple):
        return ListValue(tuple(_written(item, place, in_bytes=in_bytes, quoted=quoted) for item in value), place)
    if isinstance(value, str):
        return String(value, place) if quoted else Name(value, place)
    if in_bytes:
        text = format_bytes(value)
        digits = text.rstrip("BKMGTi")
        return Number(digits, text[len(digits) :], place)
    number = Number(_EXPONENT.sub(r"e\1", repr(abs(value))), "", place)
    return Negation(number, place) if value < 0 else number


def _after(span: Span) -> Span:
    return span._replace(start=span.end, line=span.end_line, column=span.end_column)


def _before_end(span: Span) -> Span:
    """Just before the closing bracket of ``span``."""
    end, column = span.end - 1, span.end_column - 1
    return Span(span.file, end, end, span.end_line, column, span.end_line, column)


def _bare(statement: AnyStatement) -> Statement:
    assert isinstance(statement, Statement)
    return statement
