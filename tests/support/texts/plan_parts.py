"""Plans in parts, to be written with and without each of them, and with other values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from legoai.specs.directives import FAMILIES, REQUIRED, family
from legoai.specs.directives import kinds as k
from legoai.specs.directives.base import Calls, Treatment
from legoai.specs.directives.model import FOREIGN


@dataclass(frozen=True, slots=True)
class Called:
    """A name with named arguments, as ``colwise(output = replicate)``."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{name} = {value}" if name else str(value) for name, value in self.options)
        return f"{self.name}({given})" if given else self.name


Value = str | Called


@dataclass(frozen=True, slots=True)
class Drawn:
    """One statement of a drawn plan."""

    keyword: str
    subject: Value | None = None
    axes: tuple[str, ...] = ()
    options: tuple[tuple[str, Value], ...] = ()
    rules: tuple[tuple[str, Value], ...] = ()

    def lines(self) -> list[str]:
        """The statement with each option and each rule on a line of its own, so that a line number names one."""
        head, options, last = self.keyword, self.options, "{"
        if isinstance(self.subject, Called) and family(self.keyword).subject_holds_options:
            head, options = f"{head} {self.subject.name}", self.subject.options
        elif self.subject is not None:
            head = f"{head} {self.subject}"
        lines = [" ".join([head, *([f"on {', '.join(self.axes)}"] if self.axes else [])])]
        if options:
            lines[-1] += " (" if self.subject is None or self.axes else "("
            lines += [f"  {name} = {value}" if name else f"  {value}" for name, value in options] + [")"]
        if self.rules:
            lines[-1] += f" {last}"
            lines += [f"  {path} = {value}" for path, value in self.rules] + ["}"]
        return lines


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A drawn plan in parts, to write it with and without each of them."""

    statements: tuple[Drawn, ...]

    def text(self) -> str:
        """The plan as a person would write it, one option or rule a line."""
        return "\n".join(["plan drawn", *(line for item in self.statements for line in item.lines())]) + "\n"

    def without_lines(self, wrong: set[int]) -> DrawnPlan | None:
        """The plan without the smallest part on one of these lines; None where none can be left out."""
        found = [part for part in self.parts() if wrong & set(part.lines)]
        return min(found, key=lambda part: len(part.lines)).without if found else None

    def parts(self) -> Iterator[Part]:
        """Each statement, option and rule that may be left out."""
        first = 2
        for number, item in enumerate(self.statements):
            lines = range(first, first + len(item.lines()))
            first = lines.stop
            if item.keyword not in REQUIRED:
                rest = self.statements[:number] + self.statements[number + 1 :]
                others = tuple(map(partial(self._with, number), _with_other_values(item, None)))
                yield Part(item.keyword, lines, lines.start, DrawnPlan(rest), others)
            for name, line, less in _without_a_part(item):
                own = range(lines.start + line, lines.start + line + 1)
                others = tuple(map(partial(self._with, number), _with_other_values(item, line)))
                yield Part(f"{item.keyword}: {name}", own, lines.start, self._with(number, less), others)

    def _with(self, number: int, other: Drawn) -> DrawnPlan:
        return DrawnPlan((*self.statements[:number], other, *self.statements[number + 1 :]))


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a plan says and need not say."""

    name: str
    lines: range
    """Of the plan's text."""
    statement: int
    """The line on which its statement begins."""
    without: DrawnPlan
    instead: tuple[DrawnPlan, ...]
    """The plan with other values in this place."""


def _without_a_part(item: Drawn) -> Iterator[tuple[str, int, Drawn]]:
    """Each part of a statement with its line in the statement, and the statement without it."""
    holds = isinstance(item.subject, Called) and family(item.keyword).subject_holds_options
    if isinstance(item.subject, Called):
        for index, (name, _) in enumerate(item.subject.options):
            less = _without(item.subject, index)
            if name and _is_optional(item.keyword, less, name):
                yield f"{less.name}({name})", index + 1 if holds else 0, replace(item, subject=less)
    for index, (name, value) in enumerate(item.options):
        rest, after = item.options[:index], item.options[index + 1 :]
        declared = family(item.keyword)
        if any(option.name == name and not option.required for option in declared.options):
            yield name, index + 1, replace(item, options=rest + after)
        for inner, less in _parts_of_value(value):
            yield f"{name} = {inner}", index + 1, replace(item, options=(*rest, (name, less), *after))
    first = (len(item.options) + 1 if item.options else 0) + 1
    for index, (path, value) in enumerate(item.rules):
        rest, after = item.rules[:index], item.rules[index + 1 :]
        yield f"{path} = {value}", first + index, replace(item, rules=rest + after)
        for inner, less in _parts_of_value(value):
            yield f"{path} = {inner}", first + index, replace(item, rules=(*rest, (path, less), *after))


def _with_other_values(item: Drawn, line: int | None) -> Iterator[Drawn]:
    """The statement with another value on one of its lines, or on any of them."""
    declared = family(item.keyword)
    kinds = {option.name: option.kind for option in declared.options}
    if declared.subject is not None and item.subject is not None and line in (None, 0):
        for other in other_values(kinds[declared.subject], item.subject):
            yield replace(item, subject=other)
    for index, (name, value) in enumerate(item.options):
        if name in kinds and line in (None, index + 1):  # an option of a standard layout is not the statement's
            for other in other_values(kinds[name], value):
                yield replace(item, options=(*item.options[:index], (name, other), *item.options[index + 1 :]))
    first = (len(item.options) + 1 if item.options else 0) + 1
    for index, (path, value) in enumerate(item.rules):
        if line in (None, first + index) and declared.treatments is not None:
            for other in other_values(declared.treatments, value):
                yield replace(item, rules=(*item.rules[:index], (path, other), *item.rules[index + 1 :]))


def _parts_of_value(value: Value) -> Iterator[tuple[str, Called]]:
    """The value without each of its options that may be left out."""
    if isinstance(value, Called):
        for index, (name, inner) in enumerate(value.options):
            declared = _treatment(value.name)
            if declared is not None and any(item.name == name and not item.required for item in declared.options):
                yield f"{value.name}({name} = {inner})", _without(value, index)


def _without(value: Called, index: int) -> Called:
    return Called(value.name, value.options[:index] + value.options[index + 1 :])


def _is_optional(keyword: str, subject: Called, name: str) -> bool:
    declared = family(keyword)
    options = declared.options
    if not declared.subject_holds_options:
        treatment = _treatment(subject.name)
        options = treatment.options if treatment is not None else ()
    return any(item.name == name and not item.required for item in options)


@cache
def treatments() -> dict[str, type[Treatment]]:
    """Every treatment that a plan can write, by name."""
    found: dict[str, type[Treatment]] = {}

    def visit(kind: k.Kind) -> None:
        if isinstance(kind, Calls):
            for treatment in kind.treatments:
                if treatment.name not in found or treatment.options:
                    found[treatment.name] = treatment
                    for item in treatment.options:
                        visit(item.kind)
        elif isinstance(kind, k.Either):
            for inner in kind.kinds:
                visit(inner)
        elif isinstance(kind, k.ListOf):
            visit(kind.item)

    for keyword in FAMILIES:
        declared = family(keyword)
        for item in declared.options:
            visit(item.kind)
        if declared.treatments is not None:
            visit(declared.treatments)
    return found


def _treatment(name: str) -> type[Treatment] | None:
    return treatments().get(name)


def simple_values(kind: k.Kind) -> list[str]:
    """Values of a kind that needs no model, the simplest first; none for a composite kind."""
    if isinstance(kind, k.Choice):
        return list(kind.names)
    if isinstance(kind, k.Listed):
        names = [name for name in kind.names() if name not in (*FOREIGN, "profile")]
        return [name for name in names if name.startswith("h")] * 3 + names  # devices that can do most
    if isinstance(kind, k.Integer):
        low = kind.minimum if kind.minimum is not None else -1
        values = sorted({low, low + 1, 1, 2, 4, 8, 100})
        return [str(item) for item in values if item >= low and (kind.maximum or item) >= item]
    if isinstance(kind, k.Number):
        return [str(item) for item in (0.5, 0.0, 1e-3, 0.1, 0.9, 1.0, 2.0) if _within(kind, item)]
    if isinstance(kind, k.Boolean):
        return ["true", "false"]
    if isinstance(kind, k.Text):
        return ['"aten.mm.default"', '"aten.add.Tensor"', '"some.file"']
    if isinstance(kind, k.Size):
        return ["1MiB", "25MB", "200KB", "4GiB"]
    return ["0.5", "25%"] if isinstance(kind, k.Fraction) else []


def other_values(kind: k.Kind, value: Value) -> Iterator[Value]:
    """Other values of the kind than ``value``: simple ones, and ``value`` with another option."""
    if isinstance(kind, k.Either):
        for inner in kind.kinds:
            yield from other_values(inner, value)
    elif isinstance(kind, Calls):
        for treatment in kind.treatments:
            if isinstance(value, Called) and value.name == treatment.name:
                yield from _with_other_options(treatment, value)
    else:
        yield from (item for item in dict.fromkeys(simple_values(kind)) if item != value)


def _with_other_options(treatment: type[Treatment], value: Called) -> Iterator[Called]:
    for index, (name, inner) in enumerate(value.options):
        item = next(item for item in treatment.options if item.name == name)
        for other in other_values(item.kind, inner):
            yield Called(value.name, (*value.options[:index], (name, other), *value.options[index + 1 :]))


def _within(kind: k.Number, value: float) -> bool:
    return (
        (kind.minimum is None or value >= kind.minimum)
        and (kind.maximum is None or value <= kind.maximum)
        and (kind.above is None or value > kind.above)
        and (kind.below is None or value < kind.below)
    )
