"""`loss`: the form in which the loss is computed."""

from __future__ import annotations

from legoai.dsl.analysis.parallelism.shard import parallel_loss
from legoai.dsl.analysis.training.loss import layer_of_loss
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.code import Function, Line, Node, call, literal, quoted
from legoai.lowering.emit.step import context
from legoai.specs.directives.loss import ChunkedLoss, FusedLoss
from legoai.specs.models.reads import ImagesWithTexts


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add the function that builds the loss, and the context of a loss over vocabulary shards."""
    form, layer = lowering.plan.loss.form, layer_of_loss(lowering.analysis)
    if layer is None:
        function, parameters, made = "build_loss", "", _loss(lowering, draft)
    else:
        assert isinstance(form, ChunkedLoss), "only a loss in pieces computes a layer"
        function, parameters = "build_model_loss", "model: nn.Module"
        name = draft.imports.name("legoai.runtime", "last_layer_cross_entropy")
        made = call(name, "model", quoted(layer), pieces=literal(form.n))
    result = draft.imports.name("legoai.runtime", "LossFunction")
    draft.later_functions.append(
        Function(
            f"{function}({parameters}) -> {result}",
            (Line(made, "return ", lowering.note(lowering.plan.loss, "form")),),
        )
    )
    draft.train_with(function, function)
    rule = parallel_loss(lowering.analysis)
    if rule is not None:
        draft.imports.name("torch.distributed.tensor.parallel", "loss_parallel")
        draft.step.around.append(context("loss_parallel()", rule_note(rule)))
        draft.train_with("loss_parallel", "True", rule_note(rule))


def _loss(lowering: Lowering, draft: Draft) -> Node:
    """Return the loss of the model's result."""
    form = lowering.plan.loss.form
    if isinstance(form, ChunkedLoss):
        name = draft.imports.name("legoai.runtime", "chunked_cross_entropy")
        draft.imports.module("functools")
        return call("functools.partial", name, pieces=literal(form.n))
    matches = isinstance(lowering.manifest.reads, ImagesWithTexts)
    name = draft.imports.name("legoai.runtime", "matching_cross_entropy" if matches else "token_cross_entropy")
    if isinstance(form, FusedLoss):
        draft.imports.module("torch")
        return call("torch.compile", name, fullgraph="True")
    return name
