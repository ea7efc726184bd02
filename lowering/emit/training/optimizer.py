"""`optimizer`: the function that builds the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.facts import grouped
from legoai.dsl.analysis.parallelism.replicate import replica_axes, replicas
from legoai.dsl.analysis.training.optimizer import muon_constants, parameter_rules
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import BlockGroup, block_paths, index_range
from legoai.lowering.emit.code import Function, Group, Item, Line, Statement, call, listing, literal, quoted
from legoai.lowering.emit.devices.offload import with_state_on_host
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.optimizer import Group as OwnConstants
from legoai.specs.directives.optimizer import Muon

_CLASSES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
_ALL = "parameters"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_optimizer`, with every constant spelled out."""
    optimizer = lowering.plan.optimizer
    algorithm = optimizer.algorithm
    values = {item.field: lowering.number(algorithm, item.field) for item in algorithm.options if item.field != "state"}
    if values.pop("fused") == "True":
        values["fused"] = "True"
    else:
        values["foreach"] = "True"
    draft.imports.module("torch")
    statements, given, takes = list[Statement](), _ALL, "list[dict[str, Any]]"
    rules = list(grouped(parameter_rules(lowering.analysis).items()))
    by_muon = [_taken(lowering, rule, paths) for rule, paths in rules if isinstance(rule.treatment, Muon)]
    own = [_taken(lowering, rule, paths) for rule, paths in rules if isinstance(rule.treatment, OwnConstants)]
    if rules:
        takes, given = draft.imports.name("legoai.runtime", "ParameterGroups"), "groups"
        if by_muon:
            statements.append(Line(listing(by_muon), "matrices = "))
        statements.append(Line(listing([*own, Item(f"*{_ALL}.rest()")]), "groups = "))
    else:
        draft.imports.name("typing", "Any")
    made = _made(lowering, draft, f"torch.optim.{_CLASSES[algorithm.name]}", given, values)
    if by_muon:
        muon = _made(lowering, draft, draft.imports.name("legoai.runtime", "Muon"), "matrices", {})
        parts = [Item(part, note=lowering.note(optimizer)) for part in (made, muon)]
        made = call(draft.imports.name("legoai.runtime", "CombinedOptimizer"), *parts)
    statements.append(Line(with_state_on_host(lowering, draft, made), "return ", lowering.note(optimizer)))
    draft.later_functions.append(
        Function(f"build_optimizer({_ALL}: {takes}) -> torch.optim.Optimizer", tuple(statements))
    )
    draft.train_with("build_optimizer", "build_optimizer")


def _taken(lowering: Lowering, rule: PathRule[OwnConstants | Muon], paths: list[str]) -> Item:
    """Return the groups of the parameters that follow a rule, with their constants."""
    names = [name for group in lowering.groups(dict.fromkeys(paths)) for name in _names(group)]
    treatment = rule.treatment
    if isinstance(treatment, Muon):
        constants = {name: literal(value) for name, value in muon_constants(treatment).items()}
        constants |= {item.field: lowering.number(treatment, item.field) for item in treatment.options
                      if item.field in constants}  # fmt: skip
    else:
        constants = _constants(lowering, treatment)
    return Item(call(f"*{_ALL}.take", *names, **constants), note=rule_note(rule))


def _constants(lowering: Lowering, own: OwnConstants) -> dict[str, str]:
    """Return the constants that differ from the defaults; a multiple of the default rate is written as a product."""
    algorithm = lowering.plan.optimizer.algorithm
    given = [item.field for item in own.options if getattr(own, item.field) is not None and item.field != "lr_scale"]
    found = {field: lowering.number(own, field) for field in given}
    if own.lr_scale is not None:
        found["lr"] = f"{lowering.number(own, 'lr_scale')} * {lowering.number(algorithm, 'lr')}"
    return found


def _names(group: BlockGroup[None]) -> Iterator[str]:
    """Yield the names of a group's parameters, one pattern for all blocks of a list."""
    for relative, _ in group.members:
        if group.blocks is None:
            yield quoted(relative)
            continue
        prefix = f"{group.blocks.path}." if group.blocks.path else ""
        if len(group.indices) == len(group.blocks):
            yield quoted(f"{prefix}*.{relative}")
        elif (indices := index_range(group)) is not None:
            yield f'*(f"{prefix}{{index}}.{relative}" for index in {indices})'
        else:
            yield from (quoted(f"{path}.{relative}") for path in block_paths(group))


def _made(lowering: Lowering, draft: Draft, optimizer_class: str, given: str, values: dict[str, str]) -> Group:
    """Return the optimizer, with its state on every replica or sharded over the replicas."""
    replicate = replicas(lowering.analysis)
    if replicate is None or replicate.optimizer == "replicated":
        return call(optimizer_class, given, **values)
    draft.imports.name("legoai.runtime", "ShardedOptimizer")
    made = call("ShardedOptimizer", given, optimizer_class, **values)
    axis = Item(quoted("_".join(replica_axes(lowering.analysis))), "axis=", lowering.note(replicate, "optimizer"))
    return Group(made.opening, (*made.items[:2], axis, *made.items[2:]), made.closing)
