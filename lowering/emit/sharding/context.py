"""`context`: sequence shards on different ranks, and attention over the whole sequence."""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.computation.attention import attention_modules
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Item, Line, Statement, call, quoted
from legoai.lowering.emit.held_modules import blocks_of, where_held

_WHY: Final = "puts collectives into attention, so that they are compiled and recomputed with it"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_context_parallel`, and emit the axis that shards sequences, and how."""
    context = lowering.plan.context
    if context is None or lowering.plan.mesh.cp == 1:
        return
    note = lowering.note(context)
    draft.imports.name("legoai.runtime.attention.context", "context_parallel_attention")
    options = {"rotate": quoted(context.rotate), "balance": quoted(context.dealt)}
    body: list[Statement] = []
    for group in lowering.groups(dict.fromkeys(attention_modules(lowering.analysis), note)):
        blocks = blocks_of(lowering, group)
        calls: list[Statement] = []
        for relative, line in group.members:
            path = blocks.path(relative)
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            made = call("context_parallel_attention", module, "mesh", **options)
            calls += where_held(lowering, group, path, Line(made, "", line))
        body += blocks.loop(calls)
    draft.apply("apply_context_parallel", mesh='mesh["cp"]', body=body, note=note, why=_WHY)
    draft.train_with("context_axis", quoted("cp"), note)
    draft.train_with("context_balance", quoted(context.dealt), lowering.note(context, "balance"))
    draft.step.arguments.append(Item("batch.positions", "positions="))
