"""Domains of holes without a legal member: whatever a solver chose, lint would refuse the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from legoai.dsl.diagnostics.codes.names import WrongDomain
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.specs.directives.base import Declared, Directive, PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.plan import Plan
from legoai.specs.record import replace
from legoai.specs.span import Origin, Span

_MOST_TRIALS: Final = 60
"""Plans that are checked at most; with more choices nothing is said."""

Checked = Callable[[Plan], Sequence[Diagnostic]]
"""The errors of a plan."""


def empty_domains(plan: Plan, errors: Sequence[Diagnostic], checked: Checked) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each hole whose domain has no legal value, or none with any values of the other holes.

    Holes without a domain stay open, and checks that depend on them are skipped.

    Args:
        plan: with its holes.
        errors: of the plan as it is.
        checked: returns the errors of a plan in which holes have values.
    """
    every = dict(_holes(plan))
    # Of a longer domain not every member can be checked, so that nothing would be said of it.
    holes = {span: domain for span, domain in every.items() if len(domain[: _MOST_TRIALS + 1]) <= _MOST_TRIALS}
    known = {(item.code, item.label.span) for item in errors}
    trials = 0

    def first_error(values: Mapping[Span, Any]) -> Diagnostic | None:
        nonlocal trials
        trials += 1
        found = checked(with_values(plan, values))
        return next((item for item in found if (item.code, item.label.span) not in known), None)

    alone = False
    legal: dict[Span, list[Any]] = {}
    for span, domain in holes.items():
        why: list[Diagnostic] = []
        for member in domain:
            if trials >= _MOST_TRIALS:
                return
            error = first_error({span: member})
            if error is None:
                legal.setdefault(span, []).append(member)
                if len(every) == 1:
                    return
            else:
                why.append(error)
        if span not in legal and why:
            alone = True
            yield _report(span, "no value of the domain is legal", why[0], domain[0])
    if alone or len(every) < 2 or len(holes) < len(every):
        return
    choices: list[dict[Span, Any]] = [{}]
    last: Diagnostic | None = None
    for span in holes:
        extended = []
        for chosen in choices:
            for member in legal[span]:
                if trials >= _MOST_TRIALS:
                    return
                error = first_error({**chosen, span: member}) if chosen else None
                if error is None:
                    extended.append({**chosen, span: member})
                else:
                    last = error
        choices = extended
    if not choices and last is not None:
        span = next(reversed(holes))
        others = [other for other in holes if other != span]
        yield _report(span, "no values of the domains are legal together", last, None, others)


def _report(span: Span, message: str, why: Diagnostic, member: object, others: Sequence[Span] = ()) -> Diagnostic:
    where = f"with {member}: " if member is not None else ""
    return WrongDomain.at(
        span, message, label="nothing to choose from",
        others=[Label(other, "beside this one") for other in others], help=[f"{where}{why.message} ({why.code})"],
    )  # fmt: skip


def _holes(plan: Plan) -> Iterator[tuple[Span, Sequence[Any]]]:
    """Yield each hole with a domain, with its span; one that a `let` holds may be used several times."""
    for directive in plan.directives():
        for origin, hole in _inside(directive):
            if origin.span is not None and hole.domain is not None:
                yield origin.span, hole.domain  # perhaps a range of billions


def _inside(value: Any) -> Iterator[tuple[Origin, Hole]]:
    if isinstance(value, Declared):
        for item in value.options:
            held = getattr(value, item.field)
            if isinstance(held, Hole):
                yield value.origin(item.field), held
            else:
                yield from _inside(held)
        if isinstance(value, Directive):
            yield from _inside(value.rules)
    elif isinstance(value, PathRule):
        yield from _inside(value.treatment)
    elif isinstance(value, tuple):
        for item in value:
            yield from _inside(item)


def with_values(plan: Plan, values: Mapping[Span, Any]) -> Plan:
    """The plan with values in the place of holes, by the holes' spans."""
    changes = {}
    for name in plan.fields_:
        held = getattr(plan, name)
        directives = held if isinstance(held, tuple) else (held,)
        if any(isinstance(item, Directive) for item in directives):
            changes[name] = _filled(held, values)
    return replace(plan, **changes)


def _filled(value: Any, values: Mapping[Span, Any]) -> Any:
    if isinstance(value, Declared):
        fields: dict[str, Any] = {}
        for item in value.options:
            held = getattr(value, item.field)
            span = value.origin(item.field).span
            chosen = isinstance(held, Hole) and span is not None and span in values
            fields[item.field] = values[span] if chosen and span is not None else _filled(held, values)
        fields["origins"] = value.origins
        if isinstance(value, Directive):
            fields |= {"axes": value.axes, "rules": _filled(value.rules, values), "arguments": value.arguments}
        return type(value)(**fields)
    if isinstance(value, PathRule):
        return replace(value, treatment=_filled(value.treatment, values))
    if isinstance(value, tuple):
        return tuple(_filled(item, values) for item in value)
    return value
