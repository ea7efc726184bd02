"""`compile`: calls that compile modules, before or after they are checkpointed.

A fully recomputed module is compiled first and then checkpointed, because compiling a checkpoint wrapper around
DTensors fails. A module with selective checkpointing is checkpointed first, because the policy is about operators,
which a compiled module no longer has; the compiler then saves and recomputes by the policy. Where the graph of such a
module breaks, nothing of it would be compiled, and no call is made; lint reports that. A budget of a compiled module is
the compiler's own, and needs no checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from legoai.dsl.analysis.compilation.compiled_checkpoints import compiled_after_checkpoint
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules, compiler_budgets
from legoai.dsl.analysis.compilation.graph_breaks import effectively_compiled
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.shard import shard_on_tp, tensor_parallel
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import BlockGroup, expression
from legoai.lowering.emit.code import Item, Line, Note, Statement, call, literal, quoted
from legoai.lowering.emit.held_modules import blocks_of, where_held
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.compile import AotEager, Inductor
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise

Rules = Mapping[str, PathRule[Any]]

_WHY: Final = "before units are made, so that their hooks stay outside of the graphs"
_WHY_BEFORE: Final = "before checkpointing: compiled graphs cannot contain the recomputation of DTensors"
_WHY_AFTER: Final = "after selective checkpointing, whose operators compiled graphs no longer have"
_WHY_NAMED: Final = "marks the modules that the pass `compile_regions` compiles"
_MODES: Final = {
    "reduce_overhead": "reduce-overhead",
    "max_autotune": "max-autotune",
    "max_autotune_no_cudagraphs": "max-autotune-no-cudagraphs",
}
"""Modes of `torch.compile` apart from the default."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_compile`, before or after checkpointing; where the plan needs both, two functions."""
    directive = lowering.plan.compile
    if directive is None:
        return
    if is_traced(lowering.analysis):
        _name_regions(lowering, draft, lowering.note(directive))
        return
    compiled, recomputed = effectively_compiled(lowering.analysis), checkpointed_modules(lowering.analysis)
    body: list[Statement] = []
    if directive.async_tp:
        draft.imports.name("legoai.runtime", "overlap_tensor_parallel")
        body.append(Line(call("overlap_tensor_parallel", 'mesh["tp"]'), "", lowering.note(directive, "async_tp")))
    body += _waits(lowering, draft, compiled)
    after = compiled_after_checkpoint(lowering.analysis)
    selective = {path: rule for path, rule in compiled.items() if path in after}
    whole = {path: rule for path, rule in compiled.items() if path in recomputed and path not in selective}
    first = {path: rule for path, rule in compiled.items() if path not in selective} if whole else {}
    then = {path: rule for path, rule in compiled.items() if path not in first}
    mesh = "mesh" if directive.async_tp else None
    note = lowering.note(directive)
    if first:
        body += _calls(lowering, draft, first)
        draft.apply("apply_compile", mesh=mesh, body=body, note=note, why=_WHY_BEFORE, before="apply_checkpoint")
        body, mesh = [], None
    body += _calls(lowering, draft, then)
    if body:
        name = "apply_compile_after_checkpoint" if first else "apply_compile"
        draft.apply(name, mesh=mesh, body=body, note=note, why=_WHY_AFTER if selective else _WHY)


def _name_regions(lowering: Lowering, draft: Draft, note: Note) -> None:
    """Add `apply_compile`, which marks the modules whose regions the last graph pass compiles."""
    made = {
        path: Compiled(_options_of_regions(rule), rule_note(rule))
        for path, rule in compiled_modules(lowering.analysis).items()
    }
    if not made:
        return
    draft.imports.name("legoai.lowering.graph", "compile_module")
    body = [item for group in lowering.groups(made) for item in _compile(lowering, group, of_regions=True)]
    draft.apply("apply_compile", mesh=None, body=body, note=note, why=_WHY_NAMED)


def _options_of_regions(rule: PathRule[Any]) -> tuple[Item, ...]:
    treatment = rule.treatment
    if isinstance(treatment, AotEager):
        return (Item(quoted("aot_eager"), "backend="),)
    assert isinstance(treatment, Inductor) and not treatment.dynamic and treatment.fullgraph, (
        "see `compile-under-graph`"
    )
    return (Item(quoted(_MODES[treatment.mode]), "mode="),) if treatment.mode in _MODES else ()


def _calls(lowering: Lowering, draft: Draft, compiled: Rules) -> list[Statement]:
    """The calls of `compile`, in loops over blocks."""
    budgets = compiler_budgets(lowering.analysis)
    made = {
        path: Compiled(tuple(_options(rule, budgets.get(path))), rule_note(rule)) for path, rule in compiled.items()
    }
    if not budgets.keys().isdisjoint(compiled):
        draft.imports.name("legoai.runtime", "compile_within")
    if any(_has_hooks(lowering, path) for path in made):
        draft.imports.name("legoai.runtime", "compile_with_hooks")
    return [item for group in lowering.groups(made) for item in _compile(lowering, group)]


def _has_hooks(lowering: Lowering, path: str) -> bool:
    """Whether `module.compile` would leave parts of a module out: hooks of its style, or a forward of `torch.nn`."""
    module = lowering.manifest.modules[path]
    is_layer = module.torch_forward or (not module.children and module.kind != "experts")
    return is_layer or path in tensor_parallel(lowering.analysis).styles


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compilation of one module."""

    options: tuple[Item, ...]
    """Keyword arguments of `torch.compile`."""
    note: Note


def _options(rule: PathRule[Any], budget: PathRule[Any] | None) -> Iterator[Item]:
    """Yield keyword arguments of `torch.compile`; a budget is another backend, with the note of its own rule."""
    treatment = rule.treatment
    backend = quoted("aot_eager") if isinstance(treatment, AotEager) else None
    if budget is not None:
        chosen = budget.treatment
        within = call("compile_within", literal(chosen.amount), by=quoted(chosen.by), backend=backend)
        yield Item(within, "backend=", rule_note(budget))
    elif backend is not None:
        yield Item(backend, "backend=")
    if treatment.fullgraph:
        yield Item("True", "fullgraph=")
    if isinstance(treatment, Inductor):
        yield Item(str(treatment.dynamic), "dynamic=")
        if treatment.mode in _MODES:
            yield Item(quoted(_MODES[treatment.mode]), "mode=")


def _compile(lowering: Lowering, group: BlockGroup[Compiled], *, of_regions: bool = False) -> list[Statement]:
    blocks = blocks_of(lowering, group)
    body: list[Statement] = []
    for relative, compiled in group.members:
        path = blocks.path(relative)
        module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
        if of_regions:
            value = call("compile_module", module, *compiled.options)
        elif _has_hooks(lowering, path):
            value = call("compile_with_hooks", module, *compiled.options)
        else:
            value = call(f"{module}.compile", *compiled.options)
        line = Line(value, "", compiled.note)
        body += where_held(lowering, group, path, line)
    return blocks.loop(body)


def _waits(lowering: Lowering, draft: Draft, compiled: Rules) -> list[Statement]:
    """Return calls that wait for collectives at the outputs of modules that precede compiled ones."""
    found = dict(_eager_collectives(lowering, compiled))
    for wait in found.values():
        for name in wait.functions:
            draft.imports.name("legoai.runtime", name)
    body: list[Statement] = []
    for group in lowering.groups(found):
        blocks = blocks_of(lowering, group)
        lines: list[Statement] = []
        for relative, wait in group.members:
            path = blocks.path(relative)
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            calls = [Line(call(name, module), "", wait.note) for name in wait.functions]
            lines += where_held(lowering, group, path, *calls)
        body += blocks.loop(lines)
    return body


@dataclass(frozen=True, slots=True)
class Wait:
    """The functions that make a module wait, and the plan's line that makes it communicate."""

    functions: tuple[str, ...]
    note: Note


def _eager_collectives(lowering: Lowering, compiled: Rules) -> Iterator[tuple[str, Wait]]:
    """Yield the eager modules whose outputs may be pending collectives for later or nested compiled modules."""
    shard = shard_on_tp(lowering.analysis)
    if shard is None or not compiled:
        return
    for path, rule in lowering.assignment(shard).items():
        if path not in lowering.manifest.modules or any(above in compiled for above in (path, *holders(path))):
            continue
        style = rule.treatment
        waits = []
        if isinstance(style, Inputs) and any(path in holders(held) for held in compiled):
            waits.append("wait_for_inputs")
        if _communicates(style.then if isinstance(style, Inputs) else style):
            waits.append("wait_for_output")
        if waits:
            yield path, Wait(tuple(waits), rule_note(rule))


def _communicates(style: object) -> bool:
    """Whether the style ends in a collective: rowwise reduces, the others where they change the output's layout."""
    if isinstance(style, Colwise):
        return style.output is not None and style.output.name == "replicate"
    return isinstance(style, Rowwise | Outputs)
