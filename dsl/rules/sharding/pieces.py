"""`shard`: rules about pieces and summands that are taken for the whole."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import span_of
from legoai.dsl.analysis.facts import listed
from legoai.dsl.analysis.layouts.propagation import Mismatch
from legoai.dsl.analysis.layouts.tensors import Tensor, as_list
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.sharding.neighbours import LayoutRule, came_from, leaves_at, named, producer_lines, verb
from legoai.dsl.rules.sharding.read_weights import read_by_attention
from legoai.specs.directives.layouts import Partial
from legoai.specs.directives.shard import Colwise, Heads, Inputs, Outputs, Shared, conversions
from legoai.specs.span import Span


class WholeWeightsOnPiece(LayoutRule, Check):
    """A module without a style that computes on a piece of the sequence, or of the heads.

    Its weights are whole on every rank of `tp`, but each rank sees other tokens, and so computes another
    gradient. Nothing sums them: the ranks' copies of the weights drift apart, without an error.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings                  = rowwise(input = replicate, output = shard(1))
      layers.*.attention              = inputs(from = shard(1), to = replicate)
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise(output = shard(1))
      layers.*.feed_forward           = inputs(from = shard(1), to = replicate)
      layers.*.feed_forward.{w1, w3}  = colwise
      layers.*.feed_forward.w2        = rowwise(output = shard(1))
      norm                            = sequence
      output                          = colwise(loss_parallel = true)
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings                  = rowwise(input = replicate, output = shard(1))
      layers.*.{attention, ffn}_norm  = sequence
      layers.*.attention              = inputs(from = shard(1), to = replicate)
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise(output = shard(1))
      layers.*.feed_forward           = inputs(from = shard(1), to = replicate)
      layers.*.feed_forward.{w1, w3}  = colwise
      layers.*.feed_forward.w2        = rowwise(output = shard(1))
      norm                            = sequence
      output                          = colwise(loss_parallel = true)
    }
    ```
    """

    code = "LP414"
    slug = "whole-weights-on-piece"
    kinds = ("piece",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        assert analysis.manifest is not None or analysis.layouts is None
        for span, items in self.mismatches(analysis):
            first = items[0]
            assert analysis.manifest is not None
            if first.other is not None:
                yield self._met(analysis, span, items, first.other)
                continue
            kind = analysis.manifest.modules[first.path].kind
            of_heads = kind == "norm" and first.got.moved and first.got.cuts_features
            of_linear = "`sequence(dim = 0, local = true)`" if first.got.moved else "`colwise(input = shard(1), …)`"
            cure = of_linear if kind == "linear" else "`heads`" if of_heads else "`sequence`"
            yield self.at(
                span,
                f"{named(analysis, items)} {verb(analysis, items, 'has', 'have')} no style, and only a piece arrives, "
                f"so that its weights get the gradient of that piece: `{first.got.describe()}` from "
                f"{came_from(analysis, first.got)}",
                label=f"leaves its output as `{first.got.describe()}`",
                help=[f"give it the style {cure}", "or let the whole tensor arrive"],
            )

    def _met(self, analysis: Analysis, span: Span, items: list[Mismatch], whole: Tensor) -> Diagnostic:
        first = items[0]
        weights = came_from(analysis, whole)
        return self.at(
            span,
            f"in {named(analysis, items)} a piece meets what is computed from the whole weights of {weights}, which "
            f"get the gradient of that piece: `{first.got.describe()}` from {came_from(analysis, first.got)}",
            label=f"leaves its output as `{first.got.describe()}`",
            help=["leave the layers around it whole, without a style"],
        )


class PlainWeights(LayoutRule, Check):
    """A DTensor that meets plain tensors: the weights of a module without a style, or a tensor that it is added to.

    The results of `inputs` and `sequence` are DTensors, which carry their layout. PyTorch refuses to compute with a
    DTensor and a plain tensor. A styled module accepts either, when it is called: a forward that reads its weights, as
    `nn.MultiheadAttention` does with those of its `out_proj`, meets DTensors.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings = rowwise(input = replicate, output = shard(1))
      layers.0       = inputs(from = shard(1), to = replicate)
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { tok_embeddings = rowwise(input = replicate) }
    ```
    """

    code = "LP420"
    slug = "plain-weights"
    kinds = ("plain",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, found in self.mismatches(analysis):
            first = found[0]
            items = [item for item in found if (item.other is None) == (first.other is None)]
            producer, where = came_from(analysis, first.got), named(analysis, items)
            if first.other is not None:
                message = (
                    f"in {where} a DTensor from {producer} meets a plain tensor from {came_from(analysis, first.other)}"
                )
                help = ["give both a style after which they are alike"]
            else:
                message = (
                    f"{where} {verb(analysis, items, 'has', 'have')} no style and so plain weights, and a DTensor "
                    f"arrives from {producer}"
                )
                help = [
                    "give it a style",
                    "or place its weights: `… .weight = replicate`",
                    "or let plain tensors arrive: `inputs(…, local = true)`",
                ]
            yield self.at(
                span,
                message,
                label="makes a DTensor",
                others=producer_lines(first.other, beside=span),
                help=help,
            )
        for rule, paths in read_by_attention(analysis):
            yield self.at(
                span_of(rule),
                f"{listed(paths)} is never called: attention reads its weight, which would be a DTensor and meet plain "
                "tensors",
                label="makes a DTensor",
                help=["leave it without a style"],
            )


class AttentionOnDTensors(LayoutRule, Check):
    """Attention whose queries, keys or values are DTensors.

    A layer with an individually placed weight returns a DTensor for a DTensor. Not all kernels of
    `scaled_dot_product_attention` accept it: those for a CPU have no sharding strategy. After `colwise` the heads of a
    rank are plain tensors.

    ## Example
    ```
    model gpt3("125m")
    batch (global = 256, micro = 1, seq_len = 2048)
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention                         = inputs(from = replicate, to = replicate)
      layers.*.attention.{wq, wk, wv}.weight     = shard(0)
      layers.*.attention.{wq, wk, wv}.bias       = shard(0)
      layers.*.attention.wo.weight               = shard(1)
    }
    ```

    ## Use instead
    ```
    model gpt3("125m")
    batch (global = 256, micro = 1, seq_len = 2048)
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```
    """

    code = "LP422"
    slug = "attention-on-dtensors"
    kinds = ("attends",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            yield self.at(
                span,
                f"the attention of {named(analysis, items)} gets DTensors from {came_from(analysis, items[0].got)}",
                label="leaves a DTensor",
                help=["give queries, keys and values the style `colwise`, which leaves the heads of a rank"],
            )


class NormOfHeads(LayoutRule, Check):
    """A norm over each head under `sequence`, or `heads` on a norm that does not get the heads of a rank.

    After `colwise` a rank has some of the heads and the whole sequence. `heads` runs the norm on them and sums the
    gradients of its weights; `sequence` would treat another dim as the sharded one, and return a DTensor that cannot be
    combined with the rotary table. For all heads, or full features, the norm needs no style.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention_norm         = heads
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise
    }
    ```
    """

    code = "LP421"
    slug = "norm-of-heads"
    kinds = ("norm_heads",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            first = items[0]
            producer, where = came_from(analysis, first.got), named(analysis, items)
            gets = verb(analysis, items, "gets", "get")
            assert first.rule is not None
            if not isinstance(first.rule.treatment, Heads):
                yield self.at(
                    span,
                    f"{where} {gets} the heads of a rank from {producer}, and `sequence` expects a piece of the "
                    "sequence",
                    label="expects `shard(1)`",
                    others=producer_lines(first.got, beside=span),
                    help=["write `heads`"],
                    fix=_heads_fix(first),
                )
                continue
            arrives = "a DTensor" if first.got.wrapped else f"`{first.got.describe()}`"
            yield self.at(
                span,
                f"`heads` is for norms over the heads of a rank, and {where} {gets} {arrives} from {producer}",
                label="expects the heads of a rank",
                others=producer_lines(first.got, beside=span),
                help=["leave it without a style where its input is whole", "or cut the heads before it: `colwise`"],
            )


def _heads_fix(item: Mismatch) -> Fix | None:
    span = item.rule.origin.span if item.rule is not None else None
    return Fix("write `heads`", (Edit(span, "heads"),), safe=False) if span is not None else None


class SharedOfNoHeads(LayoutRule, Check):
    """A result for all heads that no heads of a rank use, or that is not whole on every rank.

    `shared` sums the gradient of a result over the ranks of `tp`, each of which uses it for its own heads. Where every
    rank uses it for all heads, each has the whole gradient, and the sum is too large.

    ## Example
    ```
    model deepseek("v2_lite")
    mesh  (dp_shard = 16, tp = 2)
    fsdp  blocks on dp_shard
    shard on tp {
      layers.*.attention.k_rope = shared
      output                    = colwise(output = replicate)
    }
    ```

    ## Use instead
    ```
    model deepseek("v2_lite")
    mesh  (dp_shard = 16, tp = 2)
    fsdp  blocks on dp_shard
    shard standard on tp
    ```
    """

    code = "LP429"
    slug = "shared-of-no-heads"
    kinds = ("shared",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            first = items[0]
            producer, where = came_from(analysis, first.got), named(analysis, items)
            if first.rule is not None and isinstance(first.rule.treatment, Shared):
                problem = f"`shared` is for what every rank has whole, and {where} gets a part of it from {producer}"
            else:
                problem = f"{where} uses the result of {producer}, which is `shared`, for all heads"
            yield self.at(
                span,
                problem,
                label="its gradient would be summed over the ranks",
                others=producer_lines(first.got, beside=span),
                help=["cut the heads that use it: `colwise`", "or leave it without a style"],
            )


class PartialMisused(LayoutRule, Check):
    """Summands that are used as if they were the sum.

    After `output = partial` every rank holds a summand. Summands can be added to summands, and reduced later:
    `from = partial`. Added to a whole tensor they count that tensor once for each rank, and a norm or an
    activation of a summand is not a part of that of the sum.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise(output = partial)
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.feed_forward          = outputs(from = partial, to = replicate)
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise(output = partial)
    }
    ```
    """

    code = "LP415"
    slug = "partial-misused"
    kinds = ("summand",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        yield from self._made_of_wholes(analysis)
        for span, items in self.mismatches(analysis):
            first = items[0]
            summand = first.got if first.got.state == "partial" else first.other
            assert summand is not None
            whole = first.other if summand is first.got else first.got
            meets = "is not summed first"
            if whole is not None and whole.state != "partial":
                meets = f"is added to a whole one from {came_from(analysis, whole)}"
            yield self.at(
                span,
                f"in {named(analysis, items)} a summand from {came_from(analysis, summand)} {meets}",
                label="leaves its output as `partial`" if leaves_at(summand, span) else "",
                others=producer_lines(summand, beside=span),
                help=["sum it where it leaves: `output = replicate`, or `output = shard(1)`"],
            )

    def _made_of_wholes(self, analysis: Analysis) -> Iterator[Diagnostic]:
        """Yield styles that would turn replicated or sharded tensors into partial ones, which PyTorch refuses."""
        for shard in analysis.plan.shard:
            for rule in shard.rules:
                style = rule.treatment
                if isinstance(style, Colwise) and isinstance(style.output, Partial):
                    field, why = "output", "`colwise` gives pieces of the features, not summands"
                else:
                    style = next((half for half in conversions(style) if _makes_summands(half)), None)
                    field, why = "target", "a tensor that is whole or cut cannot be made into summands"
                if style is not None:
                    yield self.at(
                        analysis.span_of(style, field),
                        why,
                        label="asks for summands",
                        help=["write another layout here"],
                    )


def _makes_summands(style: Inputs | Outputs) -> bool:
    return any(
        isinstance(target, Partial) and not isinstance(source, Partial)
        for source, target in zip(as_list(style.source), as_list(style.target), strict=False)
    )


class ResultInPieces(LayoutRule, Check):
    """A model whose output leaves in pieces, although the loss needs it whole.

    A `colwise` output layer leaves each rank with the logits of a part of the vocabulary. The loss is
    computed on such parts with `loss_parallel = true`; else the logits must be gathered.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { output = colwise }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { output = colwise(loss_parallel = true) }
    ```
    """

    code = "LP419"
    slug = "result-in-pieces"
    kinds = ("result",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            got = items[0].got
            source = got.source
            if got.state not in ("shard", "partial"):
                yield self.at(
                    span,
                    f"the model's output leaves {came_from(analysis, got)} as a DTensor, and the loss takes it "
                    "for a plain tensor",
                    label="makes a DTensor",
                    help=["let it leave as a plain tensor: `outputs(from = …, to = replicate)`"],
                )
                continue
            cure = ["write `output = replicate`"]
            if source is not None and source.rule is not None and isinstance(source.rule.treatment, Colwise):
                cure = ["write `colwise(loss_parallel = true)`", "or gather the logits: `colwise(output = replicate)`"]
            yield self.at(
                span,
                f"the model's output leaves {came_from(analysis, got)} as `{got.describe()}`, and the loss takes it "
                "for whole",
                label=f"leaves its output as `{got.describe()}`",
                help=cure,
            )
