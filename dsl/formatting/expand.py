"""Expansion of a plan's defaults, so that a reader sees every decision: the output of ``legoai fmt --expand``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.resolve import Resolution
from legoai.dsl.frontend.statements.layouts import layout_named, with_rules
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
    Node,
    Number,
    PlanFile,
    Statement,
    String,
    Value,
    Variant,
    children,
)
from legoai.dsl.frontend.values.arguments import Reader, flag_of
from legoai.specs.directives import DEFAULTED, FAMILIES, family
from legoai.specs.directives import kinds as kind_of
from legoai.specs.directives.base import Calls, Declared, Directive, Option, Treatment
from legoai.specs.directives.mesh import AXES
from legoai.specs.record import Record, replace
from legoai.specs.span import Span
from legoai.specs.units import format_bytes

_EXPONENT: Final = re.compile(r"e\+?(-?)0*")


class Default(NamedTuple):
    """An option that an expansion adds: which one, and where in the plan it is left out."""

    place: int
    owner: str
    option: str
    number: int
    """Counts those that are otherwise equal, such as the rules of a layout."""


class Addition(Record):
    """A default in the text of an expansion: its span there, and the span of its statement."""

    default: Default
    span: Span
    statement: Span


class Expansion(Record):
    """A plan's text with its defaults, and where these are."""

    text: str
    additions: tuple[Addition, ...]


def expand(resolution: Resolution, without: Collection[Default] = ()) -> Expansion:
    """Return the plan in the canonical layout with missing options and statements; still the same plan.

    Statements that have defaults are added at the end, unless a base plan states them. A default that is derived from
    the rest of the plan, such as the number of stages, has no value of its own and is not written.

    Args:
        resolution: of the plan.
        without: defaults that are not written.
    """
    file = resolution.file
    writer = _Writer(resolution, without)
    statements = [writer.statement(item) for item in file.statements]
    decided = {item.keyword.text for item in resolution.statements if isinstance(item, Statement)}
    # A blank line between the plan and the additions.
    text = file.text + "\n\n"
    end = Span(file.name, len(text), len(text), 1, 1, 1, 1)
    for keyword in DEFAULTED:
        if keyword not in decided and (added := writer.missing(keyword, end)) is not None:
            statements.append(added)
    after = format_plan(PlanFile(file.name, text, tuple(statements), file.comments))
    return Expansion(after, tuple(writer.additions(statements, parse(after, file.name).file)))


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

    def __init__(self, resolution: Resolution, without: Collection[Default] = ()) -> None:
        self.resolution = resolution
        self.scope = resolution.scope
        self._without = without
        self._added: dict[int, Default] = {}
        """The defaults by the identity of the nodes that hold them."""
        self._alike: Counter[tuple[int, str, str]] = Counter()

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
                subject = self._default(item, declared, statement.keyword.span.after())
            else:
                subject = self._value(subject, item.kind)
            given = frozenset({declared.subject})
        options = self._arguments(options, declared, given, statement.span.after())
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

    def missing(self, keyword: str, place: Span) -> AnyStatement | None:
        """A statement with nothing but defaults; None where none is written."""
        added = self.statement(Statement(Name(keyword, place), None, (), None, None, place))
        assert isinstance(added, Statement)
        return None if added.subject is None and added.options is None else added

    def additions(self, written: Iterable[AnyStatement], parsed: PlanFile) -> Iterator[Addition]:
        """Yield the defaults in statements of this writer, with their spans in the text of which ``parsed`` is."""
        for statement, same in zip(written, parsed.statements, strict=True):
            for node, twin in _pairs(statement, same):
                if id(node) in self._added:
                    yield Addition(self._added[id(node)], twin.span, same.span)

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
        full = self._arguments(arguments, declared, given, name.span.after())
        return node if full is None else Call(name, full, node.span)

    def _arguments(
        self, arguments: Arguments | None, declared: type[Declared], given: frozenset[str], place: Span
    ) -> Arguments | None:
        """Return the arguments with missing ones added; ``given`` are fields that are given elsewhere."""
        items = arguments.items if arguments is not None else ()
        kinds = dict(_matched(items, declared, given))
        old = [self._argument(item, kinds.get(id(item))) for item in items]
        held = {option.field for option in kinds.values()}
        end = place if arguments is None else _before_end(arguments.span)
        new = [
            argument
            for option in declared.options
            if option.field not in held | given and (argument := self._default_argument(option, declared, end))
        ]
        if arguments is None and not new:
            return None
        joined = self._nested(old, new) if declared is family("mesh") else [*old, *new]
        return Arguments(tuple(joined), place if arguments is None else arguments.span)

    def _nested(self, old: list[Argument], new: list[Argument]) -> list[Argument]:
        """The axes of a mesh in the order of nesting, unless the plan has another one."""
        names = [item.name.text for item in old if item.name is not None and item.name.text in AXES]
        if len(names) < len(old) or names != sorted(names, key=AXES.index):
            return [*old, *new]
        joined = list(old)
        for item in new:
            inner = [index for index, other in enumerate(joined) if _depth(other) > _depth(item)]
            if inner:
                place = self._before(joined[inner[0]], joined[inner[0] - 1] if inner[0] else None)
                joined.insert(inner[0], self._moved(item, place))
            else:
                joined.append(item)
        return joined

    def _before(self, item: Argument, previous: Argument | None) -> Span:
        """The place before an argument, and before the comments that stand above it."""
        above = [
            comment.span
            for comment in self.resolution.file.comments
            if comment.alone and comment.span.end <= item.span.start
            if previous is not None and comment.span.start >= previous.span.end
        ]
        start = above[0] if above else item.span
        return start._replace(end=start.start, end_line=start.line, end_column=start.column)

    def _moved(self, argument: Argument, place: Span) -> Argument:
        assert argument.name is not None
        value = replace(argument.value, span=place)
        moved = Argument(replace(argument.name, span=place), value, place)
        self._added[id(moved)] = self._added.pop(id(argument))
        return moved

    def _argument(self, argument: Argument, option: Option | None) -> Argument:
        return argument if option is None else replace(argument, value=self._value(argument.value, option.kind))

    def _default_argument(self, option: Option, owner: type[Declared], place: Span) -> Argument | None:
        value = self._default(option, owner, place)
        if value is None:
            return None
        argument = Argument(Name(option.name, place), value, place)
        self._added[id(argument)] = self._added.pop(id(value))
        return argument

    def _default(self, option: Option, owner: type[Declared], place: Span) -> Value | None:
        """Return the default as it is written; None where there is none, or none that can or shall be written."""
        if option.required or option.default is None:
            return None
        alike = place.start, owner.__qualname__, option.name
        self._alike[alike] += 1
        default = Default(*alike, self._alike[alike])
        if default in self._without:
            return None
        in_bytes = any(isinstance(kind, kind_of.Size) for kind in _each(option.kind))
        quoted = not any(isinstance(kind, kind_of.Choice | kind_of.Listed) for kind in _each(option.kind))
        value = self._written(option.default, place, in_bytes=in_bytes, quoted=quoted)
        self._added[id(value)] = default
        return value

    def _written(self, value: Any, place: Span, *, in_bytes: bool, quoted: bool) -> Value:
        if isinstance(value, Treatment):
            arguments = [
                argument
                for option in value.options
                if (argument := self._default_argument(option, type(value), place)) is not None
            ]
            name = Name(value.name, place)
            return Call(name, Arguments(tuple(arguments), place), place) if arguments else name
        if isinstance(value, tuple):
            items = (self._written(item, place, in_bytes=in_bytes, quoted=quoted) for item in value)
            return ListValue(tuple(items), place)
        return _plain(value, place, in_bytes=in_bytes, quoted=quoted)


def _matched(
    items: Iterable[Argument], declared: type[Declared], given: frozenset[str]
) -> Iterator[tuple[int, Option]]:
    """Yield the option that each argument gives, by name or position, or as a bare name."""
    positional = [option for option in declared.options if option.field not in given]
    for index, item in enumerate(items):
        flag = flag_of(item, declared)
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


def _depth(argument: Argument) -> int:
    """The number of axes outside of the one that an argument gives."""
    assert argument.name is not None
    return AXES.index(argument.name.text)


def _pairs(left: Node, right: Node) -> Iterator[tuple[Node, Node]]:
    """The nodes of two trees of one shape, side by side."""
    yield left, right
    for one, other in zip(children(left), children(right), strict=True):
        yield from _pairs(one, other)


def _plain(value: Any, place: Span, *, in_bytes: bool, quoted: bool) -> Value:
    if isinstance(value, bool):
        return Boolean(value, place)
    if isinstance(value, str):
        return String(value, place) if quoted else Name(value, place)
    if in_bytes:
        text = format_bytes(value)
        digits = text.rstrip("BKMGTi")
        return Number(digits, text[len(digits) :], place)
    number = Number(_EXPONENT.sub(r"e\1", repr(abs(value))), "", place)
    return Negation(number, place) if value < 0 else number


def _before_end(span: Span) -> Span:
    """Just before the closing bracket of ``span``."""
    end, column = span.end - 1, span.end_column - 1
    return Span(span.file, end, end, span.end_line, column, span.end_line, column)
