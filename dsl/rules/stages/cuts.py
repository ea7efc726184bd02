"""`pipeline`: rules about cutting models that others wrote."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import written
from legoai.dsl.analysis.model import help_to_follow
from legoai.dsl.analysis.parallelism.crossings import cuts
from legoai.dsl.analysis.repetition.unequal_blocks import help_with_unequal_blocks
from legoai.dsl.analysis.stages.pipeline import has_placeholders, split_points, stage_count
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class CannotCut(Check):
    """A pipeline of a model from a factory or a Hugging Face config that cannot be cut where the plan says.

    Each stage runs the forward of the whole model, with placeholders for the modules of other stages. So exactly one
    tensor may cross each cut, straight from one module into another, and nothing else that a stage computes may need
    tokens or weights that lie elsewhere. That tensor may be laid out in any way, such as [length, batch, features], as
    long as its lengths are multiples of the batch and the length, and every stage gets and sends one of the same shape.
    Each module that a stage can begin with returns one tensor, since a placeholder does. The model returns logits of
    the shape [batch, length, vocabulary]. Modules without weights that look at no token, such as rotary embeddings, are
    on every stage. A parameter of the model itself, outside of its modules, would be on every stage too, and is
    refused. A placeholder has no attributes of the module that it replaces, such as `self.embedding.weight.dtype`, and
    another class. They may be read with a fallback, `getattr(block, "layer", None)`, and the class by `isinstance`, if
    forward then has the same operators and constants.
    """

    code = "LP518"
    slug = "cannot-cut"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        error = cuts(analysis) if has_placeholders(analysis) else None
        if plan.pipeline is None or not isinstance(error, Exception):
            return
        unequal = None if split_points(analysis).blocks else help_with_unequal_blocks(analysis)
        unequal = unequal or "split where one block hands one tensor to the next"
        yield self.at(
            analysis.span_of(plan.pipeline, "split" if written(plan.pipeline, "split") else "keyword"),
            f"this model cannot be cut into {stage_count(analysis)} stages: {error}",
            label="cannot be cut like this",
            others=[Label(analysis.span_of(plan.model, "family"), "the model")],
            help=[
                error.help or unequal or "split where one block hands one tensor to the next",
                "or train it without a pipeline",
            ]
            if analysis.manifest is None or analysis.manifest.flow_error is None
            else [*help_to_follow(analysis), "train it without a pipeline"],
        )
