"""`loss`: rules about the pieces in which the loss is computed."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import replacement
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.loss import ChunkedLoss

_DIMS = 3
"""Of logits that can be cut: [samples, tokens, vocabulary]."""


class ChunksOfSequence(Check):
    """A loss in more pieces than there are tokens to divide.

    `chunked(n)` cuts the sequence, of which a rank holds its context-parallel piece. A model of images has one
    answer for each image and no sequence of them, and one that returns logits [tokens, vocabulary] has none either.

    ## Example
    ```
    model vit("b16")
    batch (global = 256, micro = 8)
    loss chunked(8)
    ```

    ## Use instead
    ```
    model vit("b16")
    batch (global = 256, micro = 8)
    loss fused
    ```
    """

    code = "LP641"
    slug = "loss-chunks"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        form = plan.loss.form
        if not isinstance(form, ChunkedLoss):
            return
        reads = manifest.reads if manifest is not None else None
        if reads is not None and reads.kind in ("images", "images_with_texts"):
            yield self.at(
                analysis.span_of(plan.loss, "form"),
                "the loss cannot be cut along a sequence: the model gives one answer for each image",
                label="nothing to cut",
                others=[Label(analysis.span_of(plan.model, "family"), "a model of images")],
                help=["use `fused` or `eager`"],
                fix=replacement(plan.loss, "form", "fused"),
            )
            return
        gives = manifest.modules[""].gives if manifest is not None else None
        if gives is not None and len(gives) != _DIMS:
            yield self.at(
                analysis.span_of(plan.loss, "form"),
                f"the loss cannot be cut along a sequence: the model's logits have {len(gives)} dims",
                label="no dim of a sequence",
                others=[Label(analysis.span_of(plan.model, "family"), "returns logits [tokens, vocabulary]")],
                help=["return logits [samples, tokens, vocabulary], or use `fused` or `eager`"],
                fix=replacement(plan.loss, "form", "fused"),
            )
            return
        length = plan.batch.length // plan.mesh.cp
        if form.n > length:
            yield self.at(
                analysis.span_of(form, "n"),
                f"the loss cannot be cut into {form.n} pieces: a rank holds {length} tokens of a sequence",
                label=f"at most {length}",
                others=[Label(analysis.span_of(plan.batch, "seq_len"), f"{plan.batch.length} tokens")],
                help=["a handful of pieces is enough: memory falls with their number, and so does speed"],
            )
