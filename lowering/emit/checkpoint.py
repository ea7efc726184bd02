"""`checkpoint`: which modules recompute their activations in the backward pass?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legoai.dsl.diagnostics.diagnostic import Label
from legoai.dsl.frontend.paths import Paths, pattern
from legoai.lowering.emit.base import Draft, Lowering, rule_note, rule_span
from legoai.lowering.emit.blocks import Group, expression, replacement
from legoai.lowering.emit.code import Node, Note, Statement, call, literal, quoted
from legoai.lowering.emit.stages import blocks_of, where_held
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Budget, Checkpoint, Every, Full, Selective


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_checkpoint`, which wraps the modules that recompute."""
    checkpoint = lowering.plan.checkpoint
    if checkpoint is None:
        return
    for rule in checkpoint.rules:
        if isinstance(rule.treatment, Budget):
            _refuse_search(lowering, rule.treatment)
    wrapped = recomputed(lowering, lowering.assignment(checkpoint))
    if "" in wrapped:
        lowering.refuse(
            rule_span(wrapped[""]),
            "`root` cannot be checkpointed: recomputing the whole model needs the memory that it should save",
            label="name the blocks instead",
        )
        return
    if not wrapped:
        return
    module = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    draft.imports.name(module, "checkpoint_wrapper")
    _refuse_unseen(lowering, wrapped)
    wrappers = {path: _wrapper(draft, checkpoint, rule) for path, rule in wrapped.items()}
    body = [item for group in lowering.groups(wrappers) for item in _wrap(lowering, group)]
    draft.apply("apply_checkpoint", mesh=None, body=body, note=lowering.note(checkpoint))


def recomputed(lowering: Lowering, assignment: Mapping[str, PathRule[Any]]) -> dict[str, PathRule[Any]]:
    """The modules that recompute, each with its rule.

    `every(n)` counts the modules that its pattern matches, those included that another rule wins; the n-th, the 2n-th
    and so on recompute, as TorchTitan counts.
    """
    paths = Paths(list(lowering.manifest.modules))
    chosen: dict[int, set[str]] = {}
    found = {}
    for path, rule in assignment.items():
        treatment = rule.treatment
        if isinstance(treatment, Every):
            if id(rule) not in chosen:
                chosen[id(rule)] = set(paths.matching(pattern(rule.path))[treatment.n - 1 :: treatment.n])
            if path in chosen[id(rule)]:
                found[path] = rule
        elif isinstance(treatment, Full | Selective | Budget):
            found[path] = rule
    return found


def _refuse_search(lowering: Lowering, budget: Budget) -> None:
    if budget.by == "ilp":
        lowering.refuse(
            lowering.place(budget, "by"),
            "`by = ilp` is not lowered yet: an integer program over all modules together needs the search",
            help=["`knapsack` chooses the best operators of each module by itself"],
        )


def _refuse_unseen(lowering: Lowering, wrapped: Mapping[str, PathRule[Any]]) -> None:
    """Refuse to keep attention that is computed by other operators."""
    attention = lowering.plan.attention
    for rule in wrapped.values():
        treatment = rule.treatment
        if isinstance(treatment, Selective) and "attention" in treatment.keep and attention.kernel == "math":
            lowering.refuse(
                lowering.place(treatment, "keep"),
                "`attention` keeps nothing under `attention math`, which computes it from products and a softmax",
                label="no such operator",
                others=[Label(lowering.place(attention, "kernel"), "this kernel")],
                help=["keep `matmul`, or use another kernel"],
            )


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How one module is wrapped."""

    options: tuple[tuple[str, Node], ...]
    """Keyword arguments of `checkpoint_wrapper`."""
    note: Note


def _wrapper(draft: Draft, checkpoint: Checkpoint, rule: PathRule[Any]) -> Wrapper:
    treatment = rule.treatment
    options: dict[str, Node] = {}
    if isinstance(treatment, Selective):
        draft.imports.name("legoai.runtime", "keep_outputs")
        options["context_fn"] = call("keep_outputs", *(quoted(name) for name in treatment.keep))
    elif isinstance(treatment, Budget):
        draft.imports.name("legoai.runtime", "RecomputeWithin")
        options["checkpoint_fn"] = call("RecomputeWithin", literal(treatment.amount), by=quoted(treatment.by))
    if not checkpoint.preserve_rng:
        options["preserve_rng_state"] = "False"
    return Wrapper(tuple(options.items()), rule_note(rule))


def _wrap(lowering: Lowering, group: Group[Wrapper]) -> list[Statement]:
    """Wrap the members of a group, the inner ones first, since a wrapper hides what it wraps."""
    replaces_blocks = any(not relative for relative, _ in group.members)
    blocks = blocks_of(lowering, group, replace=replaces_blocks)
    body: list[Statement] = []
    for relative, wrapper in group.members:
        path = f"{blocks.base}.{relative}" if blocks.base and relative else blocks.base or relative
        module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
        place = module if relative else blocks.place
        line = replacement(place, call("checkpoint_wrapper", module, **dict(wrapper.options)))
        body += where_held(lowering, group, path, type(line)(line.value, line.prefix, wrapper.note))
    return blocks.loop(body)
