"""`loss`: the form of the loss."""

from __future__ import annotations

from legoai.dsl.analysis.shard import parallel_loss
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.code import literal, quoted
from legoai.specs.directives.loss import ChunkedLoss


def emit(lowering: Lowering, draft: Draft) -> None:
    """Say the loss, and whether it is computed on shards of the vocabulary."""
    loss = lowering.plan.loss
    draft.train_with("loss", quoted(loss.form.name), lowering.note(loss, "form"))
    if isinstance(loss.form, ChunkedLoss):
        draft.train_with("loss_pieces", literal(loss.form.n), lowering.note(loss, "form"))
    rule = parallel_loss(lowering.analysis)
    if rule is not None:
        draft.train_with("loss_parallel", "True", rule_note(rule))
