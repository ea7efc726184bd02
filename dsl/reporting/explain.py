"""Explanation of one module: its treatments, with the lines of the plan and their origins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.fsdp import resharding
from legoai.dsl.analysis.stages.pipeline import first_modules, split_points, stage_count, stages_of_ranks
from legoai.dsl.analysis.training.optimizer import parameter_rules
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.paths import ROOT, PathError, pattern
from legoai.dsl.reporting.reference import value_text
from legoai.specs.directives.base import Declared, Directive, PathRule, Staged, Treatment, walk
from legoai.specs.directives.fsdp import Unit
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.shard import Experts
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo
from legoai.specs.span import Origin
from legoai.specs.visible_text import visible_line

_WITH_RULES = ("checkpoint", "precision", "compile", "comm")
"""Directives with one rule per module, which also applies to the module's descendants."""
_WITHOUT_RULES = ("replicate", "offload")
"""Directives that are the same for every module."""


class NoSuchModuleError(ValueError):
    """The model has no such path; the message lists what it has, or names one of those that a pattern matches."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One treatment: its statement, its description, and its span."""

    statement: str
    what: str
    origin: Origin


def explain(analysis: Analysis, path: str) -> str:
    """Explain a module or a parameter, ``root`` for the model itself. The model's manifest must be known.

    Raises:
        NoSuchModuleError: the model has no such module.
    """
    assert analysis.manifest is not None
    module, parameter = _find(analysis, analysis.manifest, path)
    rows = list(decisions_of(analysis, module.path, parameter))
    head = [_title(analysis.manifest, module, parameter), f"in the plan {analysis.plan.name}{_variant(analysis)}", ""]
    first = max(len(row.statement) for row in rows)
    second = max(len(row.what) for row in rows if len(row.what) <= 64)
    lines = []
    previous = None
    for row in rows:
        statement = row.statement if row.statement != previous else ""
        lines.append(f"{statement:<{first}}  {row.what:<{second}}  {place(row.origin)}".rstrip())
        previous = row.statement
    return "\n".join([*head, *lines]) + "\n"


def decisions_of(analysis: Analysis, path: str, parameter: str | None = None) -> Iterator[Decision]:
    """Yield every treatment of the module at ``path``, and of one parameter of it."""
    plan = analysis.plan
    for shard in plan.shard:
        yield from _shard(analysis, shard, path, parameter)
    if plan.fsdp is not None:
        yield from _fsdp(analysis, plan.fsdp, path)
    if plan.pipeline is not None:
        yield Decision("pipeline on pp", _stage(analysis, path), plan.pipeline.origin("split"))
        yield from _options(plan.pipeline)
    for keyword in _WITH_RULES:
        directive = getattr(plan, keyword)
        if directive is not None:
            yield from _nearest(analysis, directive, path)
            yield from _options(directive)
        elif keyword == "checkpoint":
            yield Decision("checkpoint", "no statement: keeps every activation", Origin("default"))
        elif keyword == "compile":
            yield Decision("compile", "no statement: runs eagerly", Origin("default"))
    yield from _optimizer(analysis, path, parameter)
    for keyword in _WITHOUT_RULES:
        directive = getattr(plan, keyword)
        if directive is not None:
            yield from _options(directive)
    if _holds_attention(analysis, path):
        yield from _options(plan.attention)
        if plan.context is not None:
            yield from _options(plan.context)


def defaults_of(analysis: Analysis) -> Iterator[tuple[str, str, str]]:
    """Yield the defaults in effect: owner, option and value."""
    yield from dict.fromkeys(_defaults(analysis))


def _defaults(analysis: Analysis) -> Iterator[tuple[str, str, str]]:
    for directive in analysis.plan.directives():
        for item in walk(directive):
            if not isinstance(item, Declared):
                continue
            owner = directive.keyword if item is directive else f"{directive.keyword}: {_treatment_name(item)}"
            for option in item.options:
                value = getattr(item, option.field)
                if item.origin(option.field).decider == "default" and value is not None:
                    yield owner, option.name, value_text(value, option.kind)


def place(origin: Origin) -> str:
    """Return the span of a value, and its origin where no person wrote it."""
    if origin.decider == "default" or origin.span is None:
        return "default"
    where = visible_line(f"{origin.span.file}:{origin.span.line}")
    return where if origin.decider == "human" else f"{where} ({origin.decider})"


def _treatment_name(item: Declared) -> str:
    assert isinstance(item, Treatment)
    return item.name


def _find(analysis: Analysis, manifest: Manifest, path: str) -> tuple[ModuleInfo, str | None]:
    """The module at the path, and the parameter's name where the path is a parameter's."""
    name = "" if path == ROOT else path
    if name in manifest.modules:
        return manifest.modules[name], None
    above, _, last = name.rpartition(".")
    holder = manifest.modules.get(above)
    if holder is not None and any(parameter.name == last for parameter in holder.parameters):
        return holder, last
    with contextlib.suppress(PathError):
        matching = analysis.module_and_parameter_paths.matching(pattern(path))
        if matching:
            raise NoSuchModuleError(f"`{path}` is a pattern; name one module or parameter, such as `{matching[0]}`")
    while above and above not in manifest.modules:
        above, _, last = above.rpartition(".")
    inside = [*manifest.modules[above].children, *(item.name for item in manifest.modules[above].parameters)]
    help = [] if set("*{}") & set(last) else suggestion(last, inside)
    shown = [f"`{item}`" for item in (inside if len(inside) <= 8 else [*inside[:6], "…", inside[-1]])]
    hint = help[0] if help else f"`{above or ROOT}` holds {', '.join(shown) if shown else 'nothing'}"
    raise NoSuchModuleError(f"the model has no module or parameter `{path}`; {hint}")


def _title(manifest: Manifest, module: ModuleInfo, parameter: str | None) -> str:
    parts = [module.class_name]
    own = [item for item in module.parameters if parameter in (None, item.name)]
    parts += [f"{item.name} {' × '.join(map(str, item.shape)) or 'scalar'}" for item in own]
    for item in own:
        shared = {name for group in manifest.tied_parameters if module.child_path(item.name) in group for name in group}
        parts += [f"the same as {name}" for name in sorted(shared - {module.child_path(item.name)})]
    name = module.child_path(parameter) if parameter else module.path
    return f"{name or ROOT}: {', '.join(parts)}"


def _variant(analysis: Analysis) -> str:
    return f", variant {analysis.plan.variant}" if analysis.plan.variant else ""


def _statement(directive: Directive) -> str:
    return f"{directive.keyword} on {', '.join(directive.axes)}" if directive.axes else directive.keyword


def _options(directive: Directive) -> Iterator[Decision]:
    for option in directive.options:
        value = getattr(directive, option.field)
        if value is not None:
            text = f"{option.name} = {value_text(value, option.kind)}"
            yield Decision(_statement(directive), text, directive.origin(option.field))


def _rule(rule: PathRule[Any], directive: Directive) -> str:
    assert directive.treatments is not None
    return value_text(rule.treatment, directive.treatments)


def _undecided(directive: Directive, path: str) -> Iterator[Decision]:
    for rule in directive.rules:
        if isinstance(rule.treatment, Hole) and pattern(rule.path).matches(path):
            yield Decision(_statement(directive), "auto, not decided yet", rule.origin)


def _rules(analysis: Analysis, directive: Directive, found: list[Decision], path: str) -> dict[str, PathRule[Any]]:
    """Return the rules of modules; empty where they depend on undecided stages, with a note about that."""
    try:
        return analysis.assigned(directive).by_path
    except Undecided:
        staged = (rule for rule in directive.rules if isinstance(rule.treatment, Staged))
        own = (rule for rule in staged if pattern(rule.path).matches(path))
        found += [Decision(_statement(directive), "by its stage, not decided yet", rule.origin) for rule in own]
        return {}


def _shard(analysis: Analysis, shard: Directive, path: str, parameter: str | None) -> Iterator[Decision]:
    assert analysis.manifest is not None
    rules = analysis.assigned(shard).by_path
    statement = _statement(shard)
    found = list(_undecided(shard, path))
    if path in rules:
        found.append(Decision(statement, _rule(rules[path], shard), rules[path].origin))
    for item in analysis.manifest.modules[path].parameters:
        name = f"{path}.{item.name}" if path else item.name
        if name in rules and parameter in (None, item.name):
            found.append(Decision(statement, f"{item.name} is {_rule(rules[name], shard)}", rules[name].origin))
    for above in holders(path):
        if above in rules and isinstance(rules[above].treatment, Experts):
            found.append(Decision(statement, f"inside of {above}: {_rule(rules[above], shard)}", rules[above].origin))
    if not found:
        found.append(
            Decision(statement, f"no rule: the same on every rank of {', '.join(shard.axes)}", Origin("default"))
        )
    yield from found
    for above in holders(path):
        if above in rules and not isinstance(rules[above].treatment, Experts):
            yield Decision(statement, f"around it, {above or ROOT}: {_rule(rules[above], shard)}", rules[above].origin)


def _optimizer(analysis: Analysis, path: str, parameter: str | None) -> Iterator[Decision]:
    """The rules that the module's own parameters follow, or one of them."""
    optimizer, manifest = analysis.plan.optimizer, analysis.manifest
    if not optimizer.rules:
        return
    assert manifest is not None
    undecided = list(_undecided(optimizer, path))
    yield from undecided
    if undecided or any(isinstance(rule.treatment, Hole) for rule in optimizer.rules):
        return
    followed, info = parameter_rules(analysis), manifest.modules[path]
    for item in info.parameters:
        rule = followed.get(info.child_path(item.name))
        if parameter in (None, item.name):
            what = "as the statement says" if rule is None else _rule(rule, optimizer)
            yield Decision(
                _statement(optimizer), f"{item.name}: {what}", Origin("default") if rule is None else rule.origin
            )


def _fsdp(analysis: Analysis, fsdp: Directive, path: str) -> Iterator[Decision]:
    statement, found = _statement(fsdp), list(_undecided(fsdp, path))
    rules = _rules(analysis, fsdp, found, path)
    yield from found
    for above in (path, *holders(path)):
        rule = rules.get(above)
        if rule is not None and isinstance(rule.treatment, Unit):
            where = "is a unit" if above == path else f"in the unit {above or ROOT}"
            yield Decision(statement, where, rule.origin)
            yield Decision(statement, _reshard(rule.treatment, above), rule.treatment.origin("reshard"))
            break
    else:
        yield Decision(statement, f"in the unit {ROOT}" if path else "is a unit", Origin("default"))
        yield Decision(statement, "reshard = after_backward", Origin("default"))
    yield from _options(fsdp)


def _reshard(unit: Unit, path: str) -> str:
    return f"reshard = {value_text(resharding(unit, path), unit.option('reshard').kind)}"


def _nearest(analysis: Analysis, directive: Directive, path: str) -> Iterator[Decision]:
    """The module's own rule, and those of the modules around it."""
    statement, found = _statement(directive), list(_undecided(directive, path))
    rules = _rules(analysis, directive, found, path)
    for above in (path, *holders(path)):
        if above in rules:
            inside = "" if above == path else f"inside of {above or ROOT}: "
            found.append(Decision(statement, inside + _rule(rules[above], directive), rules[above].origin))
    if not found and directive.rules:
        found.append(Decision(statement, "no rule", Origin("default")))
    yield from found


def _stage(analysis: Analysis, path: str) -> str:
    """Describe the stage of the pipeline that contains the module."""
    from legoai.dsl.analysis.parallelism.crossings import Cuts, cuts

    plan = analysis.plan
    assert plan.pipeline is not None
    assert analysis.manifest is not None
    if any(isinstance(value, Hole) for value in (plan.pipeline.stages, plan.pipeline.split, plan.mesh.pp)):
        return "in a stage that is not decided yet"
    stages, firsts = stage_count(analysis), first_modules(analysis)
    if firsts is None:
        return "in a stage that the split of the blocks decides"
    if any(first.startswith(f"{path}." if path else "") for first in firsts):
        return f"in several of {stages} stages"
    found, start = cuts(analysis), split_points(analysis).holder(path)
    if isinstance(found, Cuts) and sum(start in stage for stage in found.stages) > 1:
        return f"in each of {stages} stages"
    order = {name: index for index, name in enumerate(analysis.manifest.modules)}
    stage = sum(order[first] <= order[path] for first in firsts)
    rank = next((rank for rank, held in enumerate(stages_of_ranks(analysis)) if stage in held), None)
    where = "" if rank is None else f", on rank {rank} of pp"
    return f"in stage {stage} of {stages} (counted from 0){where}"


def _holds_attention(analysis: Analysis, path: str) -> bool:
    """Whether the module is attention, or inside of it."""
    assert analysis.manifest is not None
    return any(analysis.manifest.modules[above].kind == "attention" for above in (path, *holders(path)))
