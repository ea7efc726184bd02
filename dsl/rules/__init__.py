"""The linter's rules: a table of modules, each with the rules of one directive family or one part of the language."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final

from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.rules.base import Check

MODULES: Final = (
    "diagnostics.codes.files",
    "diagnostics.codes.syntax",
    "diagnostics.codes.statements",
    "diagnostics.codes.names",
    "rules.model",
    "rules.updated_buffers",
    "rules.paths",
    "rules.cluster",
    "rules.mesh",
    "rules.pipeline",
    "rules.split_backward",
    "rules.split_points",
    "rules.stage_treatments",
    "rules.cuts",
    "rules.order_file",
    "rules.batch",
    "rules.precision",
    "rules.float8",
    "rules.unit_outputs",
    "rules.attention",
    "rules.loss",
    "rules.compile",
    "rules.dynamic_shapes",
    "rules.hidden_operators",
    "rules.checkpoint",
    "rules.operator_names",
    "rules.comm",
    "rules.offload",
    "rules.allocator",
    "rules.optimizer",
    "rules.parameter_groups",
    "rules.schedule",
    "rules.run",
    "rules.require",
    "rules.bounds",
    "rules.magnitudes",
    "diagnostics.codes.budgets",
    "rules.shard",
    "rules.overlap",
    "rules.experts",
    "rules.divisibility",
    "rules.layouts",
    "rules.pieces",
    "rules.draws",
    "rules.unfollowed",
    "rules.fsdp",
    "rules.units",
    "rules.replicate",
    "rules.context",
    "rules.positions",
    "rules.scalars",
    "rules.hygiene",
    "rules.idle_exceptions",
    "diagnostics.codes.lowering",
    "diagnostics.codes.importing",
    "rules.support",
)
"""Modules of rules below ``legoai.dsl``, in the order in which their checks run."""


@cache
def all_rules() -> tuple[type[Rule], ...]:
    """Every rule, by code."""
    found = []
    for name in MODULES:
        module = import_module(f"legoai.dsl.{name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Rule) and value.__module__ == module.__name__:
                found.append(value)
    return tuple(sorted(found, key=lambda rule: rule.code))


@cache
def checks() -> tuple[Check, ...]:
    """Every rule that looks at the resolved plan, ready to run, in the order of :data:`MODULES`."""
    order = {f"legoai.dsl.{name}": index for index, name in enumerate(MODULES)}
    found = [rule for rule in all_rules() if issubclass(rule, Check)]
    return tuple(rule() for rule in sorted(found, key=lambda rule: (order[rule.__module__], rule.code)))


def rule_of(code: str) -> type[Rule] | None:
    """The rule with this code or slug."""
    return next((rule for rule in all_rules() if code.upper() == rule.code or code.lower() == rule.slug), None)
