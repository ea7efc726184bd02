"""Holes of a plan: the values that each may take, or why `legoai solve` does not fill it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.domains import (
    LEARNED,
    OPEN_RULES,
    RULES,
    Use,
    decides_learning,
    is_item,
    open_styles,
    values_of,
)
from legoai.dsl.diagnostics.codes.lowering import HoleNotSearched
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.formatting.unparse import value_on_one_line
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.resolve import Resolution
from legoai.dsl.frontend.statements.merge import OF_SETTING
from legoai.dsl.frontend.syntax import Auto, Let, ListValue, Name, Node, Statement, Value, children, holes_in, same
from legoai.specs.directives import kinds
from legoai.specs.directives.base import Declared, Directive, PathRule
from legoai.specs.directives.comm import Comm
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.pipeline import Pipeline
from legoai.specs.directives.shard import Shard
from legoai.specs.plan import Plan
from legoai.specs.record import Record
from legoai.specs.span import Span

_MOST_CHOICES: Final = 4096
"""Members of a domain: more than the divisors of any number of devices, and few enough to be looked at."""


class OpenHole(Record, kw_only=True):
    """A hole to be filled.

    ``what`` describes it, and ``option`` is the name of the option that it is the value of, if any; ``choices`` are the
    values to choose from, as a plan writes them, and ``nodes`` the same as syntax trees; the first ``listed`` are its
    domain, and the others were added by :meth:`OpenPlan.add`. ``answer`` is the text of the plan's answer for it, if
    there is one. ``owner`` is the enclosing statement or treatment; None for an option of a standard layout, whose
    rules depend on the answer. ``assigns`` is whether it is a split into stages without a domain, of which there are
    more than are listed; ``buckets`` the same for buckets of units. ``free`` is whether it has no domain of its own,
    and ``path`` the path of the rule whose treatment it is, if any. ``line`` is the line of a rule on `tp` whose style
    is open: such holes are decided together by a program, and not searched one by one.
    """

    span: Span
    what: str
    option: str | None
    owner: type[Declared] | None
    choices: tuple[str, ...]
    nodes: tuple[Value, ...]
    listed: int
    answer: str | None
    assigns: bool
    buckets: bool = False
    free: bool = False
    path: str | None = None
    line: Span | None = None

    @property
    def axis(self) -> str | None:
        """The axis of the mesh whose size it is, if it is one."""
        return self.option if self.owner is Mesh else None


class _Seen(Record):
    """What is known of a hole: its uses, its values as a plan writes them, or why it is not filled.

    ``line`` is that of :class:`OpenHole`. ``without`` is whether the reason is that it has no values, which may be
    because the plan has errors, or because its model is unknown. ``others`` are the places of the reason.
    """

    uses: tuple[Use, ...]
    choices: tuple[str, ...] = ()
    problem: str = ""
    line: Span | None = None
    without: bool = False
    others: tuple[Label, ...] = ()


def refusals(
    found: Resolution, analysis: Analysis | None, *, complete: bool = True, expands: bool = False
) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each hole that `legoai solve` does not fill.

    Args:
        found: a plan with its holes open (:func:`all_open`).
        analysis: of it; None where a statement cannot be read without an answer.
        complete: whether holes without values are among them, and those that no statement read: not of a plan with
            other errors, or whose model is unknown.
        expands: whether rules will stand in the place of `shard auto on tp`.
    """
    expands = expands and (analysis is None or chooses_styles(analysis))
    for node, asked in _searched(found):
        seen = _seen(node, asked, found, analysis)
        if seen.problem and (complete or not seen.without) and not (expands and _is_expanded(node.span, found, seen)):
            yield _refusal(node.span, seen.problem, seen.others)
    for statement in found.statements if complete else ():
        if not isinstance(statement, Let):
            for node in holes_in(statement):
                if node.span not in found.scope.asked:
                    yield _refusal(node.span, "this hole is in a place where none is searched")


def open_holes(found: Resolution, analysis: Analysis | None) -> Iterator[OpenHole]:
    """Yield the holes that `legoai solve` fills, in the order of the text. Arguments are those of :func:`refusals`."""
    for node, asked in _searched(found):
        seen = _seen(node, asked, found, analysis)
        if seen.problem:
            continue
        answer = value_on_one_line(found.file, node.answer) if node.answer is not None else None
        uses = seen.uses
        yield OpenHole(
            span=node.span,
            what=_named(uses, node, found.file.text),
            option=_option_of(*uses[0]) if uses else None,
            owner=type(uses[0][0]) if uses else None,
            choices=seen.choices,
            nodes=tuple(map(value_of, seen.choices)),
            listed=len(seen.choices),
            answer=answer,
            assigns=node.domain is None and bool(uses) and all(map(_is_split, uses)),
            buckets=node.domain is None and bool(uses) and all(map(_is_bucket, uses)),
            free=node.domain is None,
            path=_path_of(uses, node),
            line=seen.line,
        )


def all_open(
    found: Resolution, again: Callable[[Mapping[Span, Value | None]], Resolution], *, bases: bool = False
) -> tuple[Resolution, dict[Span, Value | None]]:
    """Return a plan with its holes open, those with answers too, and the answer of each: None.

    Args:
        found: the plan as it is.
        again: resolves it with other answers than those of its text.
        bases: whether to open holes with answers in the file of a base plan too, which is solved by itself.
    """
    answers: dict[Span, Value | None] = {}
    while closed := [node for node, _ in _searched(found, bases=bases) if node.span not in answers]:
        answers |= dict.fromkeys(node.span for node in closed)
        if any(node.answer is not None for node in closed):
            found = again(answers)
    return found, answers


def readable_open(
    closed: Resolution, again: Callable[[Mapping[Span, Value | None]], Resolution]
) -> tuple[Resolution, dict[Span, Value | None]]:
    """Return a plan with its holes open as far as it can be read then, and the answer of each of these: None.

    A statement such as a standard layout cannot be read without the answers for its options, which then stay as they
    are. Arguments are those of :func:`all_open`.
    """
    opened, answers = all_open(closed, again, bases=True)
    if opened.plan is not None and not opened.unreadable:
        return opened, answers
    found, left = closed, dict[Span, Value | None]()
    for span in answers:
        other = again({**left, span: None})
        if other.plan is not None and not other.unreadable:
            found, left[span] = other, None
    return found, left


def _searched(found: Resolution, *, bases: bool = False) -> Iterator[tuple[Auto, Sequence[kinds.Kind]]]:
    """Yield the holes that were read, in the order of the text; with ``bases`` those that a base plan answers too."""
    for span, (node, asked) in sorted(found.scope.asked.items()):
        if bases or node.answer is None or span.file == found.file.name:
            yield node, asked


def _seen(node: Auto, asked: Sequence[kinds.Kind], found: Resolution, analysis: Analysis | None) -> _Seen:
    uses = tuple(uses_of(found.plan, node.span)) if found.plan is not None else ()
    problem = _never(node.span, found, uses)
    if problem is not None:
        return _Seen(uses, problem=problem)
    if isinstance(node.domain, ListValue) and any(_names_hole(item, found) for item in node.domain.items):
        return _Seen(uses, problem="the values to choose from cannot have holes themselves")
    line, choices = _choices(uses, node, asked, found, analysis)
    expanded = any(isinstance(owner, Shard) and place_of_rules(owner) == node.span for owner, _ in uses)
    if (line is not None or expanded) and analysis is not None and not chooses_styles(analysis):
        problem = "styles are chosen by their cost for tokens, and the model reads none: give "
        return _Seen(uses, problem=problem + ("rules with a domain" if expanded else "a domain"), without=True)
    if not choices:
        problem, devices = "holes of this kind are not searched without a domain", _open_devices(uses, analysis)
        if devices:
            decide = " and ".join(f"`{name}`" for name in devices)
            problem = f"the number of devices is open: give `{_option_of(*uses[0])}` a domain, or decide {decide}"
        return _Seen(uses, problem=problem, without=True, others=tuple(devices.values()))
    if len(choices) > _MOST_CHOICES:
        return _Seen(uses, problem=f"the domain has more values than the {_MOST_CHOICES:,} that are searched")
    return _Seen(uses, tuple(choices), line=line)


def _choices(
    uses: Sequence[Use], node: Auto, asked: Sequence[kinds.Kind], found: Resolution, analysis: Analysis | None
) -> tuple[Span | None, list[str]]:
    """The line of a rule on `tp` whose style the hole is, if it is one, and the values of the hole."""
    if node.domain is not None:
        return None, _written(node, found)
    line, styles = _styles(uses, node, analysis)
    if styles:
        return line, styles
    lists = [values_of(use, kind, analysis) for use, kind in _paired(uses, asked)]
    return None, [item for item in lists[0] if all(item in other for other in lists[1:])]


def _open_devices(uses: Sequence[Use], analysis: Analysis | None) -> dict[str, Label]:
    """The open numbers of hosts and devices, by name, where the hole is the size of an axis, which divides them."""
    if analysis is None or not uses or not isinstance(uses[0][0], Mesh):
        return {}
    cluster = analysis.plan.cluster
    names = (name for name in ("hosts", "devices") if isinstance(getattr(cluster, name), Hole))
    return {name: Label(analysis.span_of(cluster, name), f"`{name}` is open") for name in names}


def _names_hole(value: Node, found: Resolution) -> bool:
    """Whether a value of a domain names a `let` that is open, or has such a name in it."""
    if isinstance(value, Name):
        return isinstance(found.scope.look_up(value)[0], Auto)
    return any(_names_hole(child, found) for child in children(value))


def other_answers(found: Resolution, analysis: Analysis) -> Iterator[tuple[Span, Value]]:
    """Yield holes with answers, those of base plans too, each with a value that it might have instead.

    Args:
        found: a plan with its holes open (:func:`all_open`).
        analysis: of it.
    """
    for node, asked in _searched(found, bases=True):
        if node.answer is not None:
            _, choices = _choices(tuple(uses_of(analysis.plan, node.span)), node, asked, found, analysis)
            values = (value_of(text) for text in choices[:_MOST_CHOICES])
            yield from ((node.span, value) for value in values if not same(value, node.answer))


def _is_expanded(span: Span, found: Resolution, seen: _Seen) -> bool:
    """Whether it is the hole of `shard auto on tp`, in whose place :mod:`legoai.dsl.open_rules` writes rules."""
    owners = [owner for owner, _ in seen.uses if isinstance(owner, Shard)]
    return span.file == found.file.name and any(place_of_rules(owner) == span for owner in owners)


def chooses_styles(analysis: Analysis) -> bool:
    """Whether styles without a domain are searched, whose costs are those of a rank's tokens."""
    return analysis.plan.batch.seq_len is not None


def place_of_rules(shard: Shard) -> Span | None:
    """The span of the `auto` that stands in place of rules on `tp`; None for other statements."""
    first = shard.rules[0] if shard.rules and shard.axes == OPEN_RULES else None
    if first is None or not isinstance(first.treatment, Hole) or first.origin.span != first.path_origin.span:
        return None
    return first.origin.span


def _styles(uses: Sequence[Use], node: Auto, analysis: Analysis | None) -> tuple[Span | None, list[str]]:
    """Return the line and the choices of style, where the hole is that of a rule on `tp` without a domain."""
    if len(uses) != 1 or not isinstance(uses[0][0], Shard) or uses[0][1] != RULES:
        return None, []
    owner = uses[0][0]
    rule = _rule_at(owner, node.span)
    styles = open_styles(owner.axes, rule.path, analysis)
    return rule.origin.span if styles else None, list(styles)


def _written(node: Auto, found: Resolution) -> list[str]:
    """The members of the hole's own domain."""
    if isinstance(node.domain, ListValue):
        file = found.files[node.span.file]
        return list(dict.fromkeys(value_on_one_line(file, item) for item in node.domain.items))
    assert node.domain is not None
    ends = [found.scope.arithmetic(end) for end in (node.domain.first, node.domain.last)]
    first, last = (0 if isinstance(end, Diagnostic) else int(end[0]) for end in ends)
    return [str(value) for value in range(first, min(last, first + _MOST_CHOICES) + 1)]


def uses_of(value: Any, span: Span) -> Iterator[Use]:
    """Yield the spans of a plan at which the hole occurs."""
    if isinstance(value, Plan):
        for directive in value.directives():
            yield from uses_of(directive, span)
    elif isinstance(value, Declared):
        for item in value.options:
            held = getattr(value, item.field)
            if isinstance(held, Hole):
                if held.span == span:
                    yield value, item.field
            elif isinstance(held, tuple) and any(isinstance(part, Hole) for part in held):
                if any(isinstance(part, Hole) and part.span == span for part in held):
                    yield value, item.field
            else:
                yield from uses_of(held, span)
        for rule in value.rules if isinstance(value, Directive) else ():
            if isinstance(rule.treatment, Hole):
                if rule.treatment.span == span:
                    yield value, RULES
            else:
                yield from uses_of(rule.treatment, span)
    elif isinstance(value, tuple):
        for item in value:
            yield from uses_of(item, span)
    elif isinstance(value, PathRule):
        yield from uses_of(value.treatment, span)


def _is_split(use: Use) -> bool:
    owner, field = use
    return isinstance(owner, Pipeline) and field == "split" and isinstance(owner.split, Hole)


def _is_bucket(use: Use) -> bool:
    owner, field = use
    return isinstance(owner, Comm) and field == RULES


def _paired(uses: Sequence[Use], asked: Sequence[kinds.Kind]) -> Iterator[tuple[Use | None, kinds.Kind]]:
    """Yield each use with its kind; a hole that a `let` names may have several."""
    if not uses:
        yield from ((None, kind) for kind in asked)
        return
    for owner, field in uses:
        treated = owner.treatments if field == RULES and isinstance(owner, Directive) else None
        kind: kinds.Kind = treated or type(owner).option(field).kind
        if is_item((owner, field)):
            kind = next(part.item for part in kinds.parts_of(kind) if isinstance(part, kinds.ListOf))
        yield (owner, field), kind


def _never(span: Span, found: Resolution, uses: Sequence[Use]) -> str | None:
    """Return why a hole cannot be searched whatever its domain."""
    if span.file.startswith(OF_SETTING):
        return "`--set` gives a value: write `auto` in the plan to have it searched"
    if span.file != found.file.name:
        return "the hole stands in the file of a base plan: solve that plan, or decide the value in this one"
    if any(span.is_inside(other) for other in found.scope.asked if other != span):
        return "the values to choose from cannot have holes themselves"
    statement = next((item for item in found.statements if span.is_inside(item.span)), None)
    directives = () if found.plan is None else found.plan.directives()
    keywords = {directive.keyword for directive in directives if any(True for _ in uses_of(directive, span))}
    if isinstance(statement, Statement):
        keywords.add(statement.keyword.text)
    learned = next((keyword for keyword in LEARNED if keyword in keywords), None)
    if learned is not None:
        return f"`{learned}` decides what is learned or written, not what a step costs"
    return next((reason for owner, field in uses if (reason := decides_learning(type(owner), field)) is not None), None)


def _refusal(span: Span, problem: str, others: Sequence[Label] = ()) -> Diagnostic:
    lists = "domain" in problem
    help = ["name the values to choose from: `auto in [a, b]`"] if lists else ["give the value"]
    return HoleNotSearched.at(span, problem, label="not searched", others=others, help=help)


def _named(uses: Sequence[Use], node: Auto, text: str) -> str:
    if not uses:
        words = re.findall(r"\w+", text[: node.span.start].rpartition("\n")[2])
        return words[-1] if words else "hole"
    owner, field = uses[0]
    if field == RULES:
        assert isinstance(owner, Directive)
        return f"{owner.keyword} {_rule_at(owner, node.span).path}"
    name = _option_of(owner, field)
    assert name is not None, "a field other than the rules is an option"
    return f"{owner.keyword} {name}" if isinstance(owner, Directive) else name


def _option_of(owner: Declared, field: str) -> str | None:
    """The name of the option that a field holds; None for the rules of a statement."""
    return None if field == RULES else type(owner).option(field).name


def _path_of(uses: Sequence[Use], node: Auto) -> str | None:
    """Return the path of the rule whose treatment is the hole; None where there is none, or several."""
    if len(uses) != 1 or uses[0][1] != RULES:
        return None
    owner = uses[0][0]
    assert isinstance(owner, Directive)
    return _rule_at(owner, node.span).path


def _rule_at(owner: Directive, span: Span) -> PathRule[Any]:
    """Return the rule of a statement whose treatment is the hole at ``span``."""
    return next(rule for rule in owner.rules if isinstance(rule.treatment, Hole) and rule.treatment.span == span)


def value_of(text: str) -> Value:
    """The tree of a value's text."""
    [statement] = parse(f"let answer = auto -> {text}", "an answer").file.statements
    assert isinstance(statement, Let)
    assert isinstance(statement.value, Auto)
    assert statement.value.answer is not None
    return statement.value.answer
