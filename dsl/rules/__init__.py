"""The linter's rules: a table of modules, each with the rules of one directive family or one part of the language."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final

from legoai.dsl.rules.base import Check, Rule

MODULES: Final = (
    "files",
    "syntax",
    "names",
    "model",
    "paths",
    "cluster",
    "mesh",
    "pipeline",
    "split_backward",
    "split_points",
    "cuts",
    "order_file",
    "batch",
    "precision",
    "float8",
    "unit_outputs",
    "attention",
    "loss",
    "compile",
    "checkpoint",
    "comm",
    "offload",
    "optimizer",
    "schedule",
    "require",
    "budgets",
    "shard",
    "divisibility",
    "layouts",
    "pieces",
    "fsdp",
    "units",
    "replicate",
    "context",
    "positions",
    "scalars",
    "hygiene",
    "lowering",
)
"""Modules of rules, in the order in which their checks run."""


@cache
def all_rules() -> tuple[type[Rule], ...]:
    """Every rule, by code."""
    found = []
    for name in MODULES:
        module = import_module(f"legoai.dsl.rules.{name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Rule) and value.__module__ == module.__name__:
                found.append(value)
    return tuple(sorted(found, key=lambda rule: rule.code))


@cache
def checks() -> tuple[Check, ...]:
    """Every rule that looks at the resolved plan, ready to run, in the order of :data:`MODULES`."""
    order = {f"legoai.dsl.rules.{name}": index for index, name in enumerate(MODULES)}
    found = [rule for rule in all_rules() if issubclass(rule, Check)]
    return tuple(rule() for rule in sorted(found, key=lambda rule: (order[rule.__module__], rule.code)))


def rule_of(code: str) -> type[Rule] | None:
    """The rule with this code or slug."""
    return next((rule for rule in all_rules() if code.upper() == rule.code or code.lower() == rule.slug), None)
