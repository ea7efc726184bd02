"""`loss`: the form in which the loss is computed."""

from __future__ import annotations

from legoai.dsl.analysis.parallelism.shard import parallel_loss
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.code import Function, Line, Node, call, literal
from legoai.lowering.emit.step import context
from legoai.specs.directives.loss import ChunkedLoss, FusedLoss
from legoai.specs.models.reads import ImagesWithTexts


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_loss`, and the context of a loss over vocabulary shards."""
    loss = lowering.plan.loss
    matches = isinstance(lowering.manifest.reads, ImagesWithTexts)
    name = "matching_cross_entropy" if matches else "token_cross_entropy"
    if isinstance(loss.form, ChunkedLoss):
        name = "chunked_cross_entropy"
    draft.imports.name("legoai.runtime", name)
    draft.imports.name("legoai.runtime", "LossFunction")
    made: Node = name
    if isinstance(loss.form, ChunkedLoss):
        draft.imports.module("functools")
        made = call("functools.partial", name, pieces=literal(loss.form.n))
    elif isinstance(loss.form, FusedLoss):
        draft.imports.module("torch")
        made = call("torch.compile", name, fullgraph="True")
    draft.later_functions.append(
        Function("build_loss() -> LossFunction", (Line(made, "return ", lowering.note(loss, "form")),))
    )
    draft.train_with("build_loss", "build_loss")
    rule = parallel_loss(lowering.analysis)
    if rule is not None:
        draft.imports.name("torch.distributed.tensor.parallel", "loss_parallel")
        draft.step.around.append(context("loss_parallel()", rule_note(rule)))
        draft.train_with("loss_parallel", "True", rule_note(rule))
