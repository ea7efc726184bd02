"""Copies of directives and plans with changed values and rules, which keep their spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from legoai.specs.directives.base import Declared, Directive, Divided, PathRule, Treatment
from legoai.specs.plan import Plan
from legoai.specs.record import replace

D = TypeVar("D", bound=Declared)

Rewrite = Callable[[Directive, PathRule[Any]], PathRule[Any] | None]


def changed(declared: D, **values: Any) -> D:
    """Return a copy of a directive or treatment with other values; spans are kept."""
    fields: dict[str, Any] = {item.field: getattr(declared, item.field) for item in declared.options}
    if isinstance(declared, Directive):
        fields |= {"axes": declared.axes, "rules": declared.rules, "arguments": declared.arguments}
    return type(declared)(**{**fields, "origins": declared.origins, **values})


def with_every_rule(plan: Plan, rewrite: Rewrite) -> Plan:
    """Return the plan with every rule rewritten; rules for which the rewrite returns None are dropped."""

    def over(directive: D) -> D:
        assert isinstance(directive, Directive)
        return with_rules(directive, lambda rule: rewrite(directive, rule))

    found = replace(plan, shard=tuple(over(item) for item in plan.shard))
    for field in ("fsdp", "checkpoint", "comm", "precision", "compile", "optimizer"):
        directive = getattr(plan, field)
        if directive is not None and directive.rules:
            found = replace(found, **{field: over(directive)})
    return found


def with_rules(directive: D, rewrite: Callable[[PathRule[Any]], PathRule[Any] | None]) -> D:
    """Return the directive with its rules rewritten; rules for which the rewrite returns None are dropped."""
    assert isinstance(directive, Directive)
    if not directive.rules:
        return directive
    found = [rewrite(rule) for rule in directive.rules]
    return changed(directive, rules=tuple(rule for rule in found if rule is not None))


def with_parts(rule: PathRule[Any], rewrite: Callable[[Treatment], Treatment]) -> PathRule[Any]:
    """Return the rule with its treatment rewritten, or both treatments of a divided rule."""
    divided = rule.treatment
    if isinstance(divided, Divided):
        divided = changed(divided, these=rewrite(divided.these), others=rewrite(divided.others))
        return replace(rule, treatment=divided)
    return replace(rule, treatment=rewrite(rule.treatment))


def of_statement(directive: Directive) -> Mapping[str, Any]:
    """Return the span of the statement itself, without its values."""
    return {name: origin for name, origin in directive.origins.items() if name in ("", "keyword")}
