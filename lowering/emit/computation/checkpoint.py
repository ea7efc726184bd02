"""`checkpoint`: wrappers of the modules that recompute their activations in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.computation.checkpoint import keeps_random_state, stops_early
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import MODEL, BlockGroup, expression, replacement
from legoai.lowering.emit.code import Line, Node, Note, Statement, call, literal, quoted
from legoai.lowering.emit.held_modules import blocks_of, where_held
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Budget, Selective

_WHY: Final = "before units are made, so that their hooks enclose the recomputation"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_checkpoint`, which wraps the modules that recompute."""
    checkpoint = lowering.plan.checkpoint
    if checkpoint is None:
        return
    wrapped = checkpointed_modules(lowering.analysis)
    if not wrapped:
        return
    module = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    draft.imports.name(module, "checkpoint_wrapper")
    wrappers = {
        path: _wrapper(
            draft,
            rule,
            keeps=keeps_random_state(lowering.analysis, path),
            early=stops_early(lowering.analysis, path),
            is_shared=lowering.manifest.is_shared(path),
        )
        for path, rule in wrapped.items()
    }
    body = [item for group in lowering.groups(wrappers) for item in _wrap(lowering, group)]
    draft.apply("apply_checkpoint", mesh=None, body=body, note=lowering.note(checkpoint), why=_WHY)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Wrapper of one module."""

    options: tuple[tuple[str, Node], ...]
    """Keyword arguments of `checkpoint_wrapper`."""
    is_shared: bool
    """Whether it takes several places."""
    note: Note


def _wrapper(draft: Draft, rule: PathRule[Any], *, keeps: bool, early: bool, is_shared: bool) -> Wrapper:
    treatment = rule.treatment
    options: dict[str, Node] = {}
    if isinstance(treatment, Selective):
        draft.imports.name("legoai.runtime", "keep_outputs")
        options["context_fn"] = call("keep_outputs", *(quoted(name) for name in treatment.keep))
    elif isinstance(treatment, Budget):
        draft.imports.name("legoai.runtime", "RecomputeWithin")
        options["checkpoint_fn"] = call("RecomputeWithin", literal(treatment.amount), by=quoted(treatment.by))
    if not keeps:
        options["preserve_rng_state"] = "False"
    if not early:
        options["early_stop"] = "False"
    if is_shared:
        draft.imports.name("legoai.runtime", "replace_everywhere")
    return Wrapper(tuple(options.items()), is_shared, rule_note(rule))


def _wrap(lowering: Lowering, group: BlockGroup[Wrapper]) -> list[Statement]:
    """Wrap the members of a group, the inner ones first, since a wrapper hides its module's members."""
    replaces_blocks = any(not relative for relative, _ in group.members)
    blocks = blocks_of(lowering, group, replace=replaces_blocks)
    body: list[Statement] = []
    for relative, wrapper in group.members:
        path = blocks.path(relative)
        module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
        place = module if relative else blocks.place
        made = call("checkpoint_wrapper", module, **dict(wrapper.options))
        line = replacement(place, made)
        if wrapper.is_shared:
            line = Line(call("replace_everywhere", MODEL, module, made))
        body += where_held(lowering, group, path, type(line)(line.value, line.prefix, wrapper.note))
    return blocks.loop(body)
