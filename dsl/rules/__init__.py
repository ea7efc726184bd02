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
    "rules.training.model",
    "rules.training.unsimulated",
    "rules.training.updated_buffers",
    "rules.training.changed_parameters",
    "rules.paths",
    "rules.devices.cluster",
    "rules.devices.profile",
    "rules.devices.mesh",
    "rules.stages.pipeline",
    "rules.stages.split_backward",
    "rules.stages.split_points",
    "rules.stages.stage_treatments",
    "rules.stages.cuts",
    "rules.stages.order_file",
    "rules.training.batch",
    "rules.computation.precision",
    "rules.computation.mixed_dtypes",
    "rules.computation.float8",
    "rules.data_parallelism.unit_outputs",
    "rules.computation.attention",
    "rules.computation.loss",
    "rules.computation.compile",
    "rules.computation.dynamic_shapes",
    "rules.computation.hidden_operators",
    "rules.computation.recurrent",
    "rules.computation.synchronised",
    "rules.computation.untraced",
    "rules.computation.broken_checkpoints",
    "rules.computation.checkpoint",
    "rules.computation.random_state",
    "rules.computation.operator_names",
    "rules.data_parallelism.comm",
    "rules.devices.offload",
    "rules.devices.allocator",
    "rules.training.optimizer",
    "rules.training.parameter_groups",
    "rules.training.schedule",
    "rules.training.run",
    "rules.require",
    "rules.bounds",
    "rules.magnitudes",
    "diagnostics.codes.budgets",
    "rules.sharding.shard",
    "rules.sharding.overlap",
    "rules.sharding.experts",
    "rules.sharding.divisibility",
    "rules.sharding.layouts",
    "rules.sharding.pieces",
    "rules.sharding.draws",
    "rules.sharding.unfollowed",
    "rules.data_parallelism.fsdp",
    "rules.data_parallelism.units",
    "rules.data_parallelism.replicate",
    "rules.sharding.context",
    "rules.sharding.attention_arguments",
    "rules.sharding.positions",
    "rules.sharding.scalars",
    "rules.in_place",
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


@cache
def checks_for_errors() -> tuple[Check, ...]:
    """Those of :func:`checks` whose diagnostics are errors."""
    return tuple(rule for rule in checks() if rule.severity == "error")


def rule_of(code: str) -> type[Rule] | None:
    """The rule with this code or slug."""
    return next((rule for rule in all_rules() if code.upper() == rule.code or code.lower() == rule.slug), None)
