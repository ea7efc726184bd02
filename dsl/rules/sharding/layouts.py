"""`shard`: rules about layouts that disagree between modules that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import replacement
from legoai.dsl.analysis.layouts.propagation import Mismatch
from legoai.dsl.analysis.layouts.tensors import Tensor, as_list
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Fix
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.sharding.neighbours import LayoutRule, came_from, leaves_at, named, producer_lines, text_of, verb
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise, SequenceStyle, conversions
from legoai.specs.span import Span


class LayoutMismatch(LayoutRule, Check):
    """A tensor that arrives in another layout than the one that a style expects.

    A style assumes the layout of its input, and PyTorch does not check it: a shard of a sequence that is treated as the
    whole gives shapes that do not match, or numbers that are silently wrong. Where a module has no style its input must
    match the full weights. Two tensors that are added must have equal layouts. A mean or softmax over all features must
    not take a shard of them.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      tok_embeddings                  = rowwise(input = replicate, output = shard(1))
      layers.*.{attention, ffn}_norm  = sequence
      layers.*.attention              = inputs(from = replicate, to = replicate)
      layers.*.attention.{wq, wk, wv} = colwise
      layers.*.attention.wo           = rowwise(output = shard(1))
      layers.*.feed_forward           = inputs(from = shard(1), to = replicate)
      layers.*.feed_forward.{w1, w3}  = colwise
      layers.*.feed_forward.w2        = rowwise
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

    code = "LP412"
    slug = "layout-mismatch"
    kinds = ("arrives", "mixed", "norm_dim", "over_shard")

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            first = items[0]
            if first.kind == "mixed":
                yield self._mixed(analysis, span, first)
            elif first.kind == "over_shard":
                yield self.at(
                    span,
                    f"{named(analysis, items)} {verb(analysis, items, 'computes', 'compute')} over all features of "
                    f"{came_from(analysis, first.got)}, such as their mean, and each rank has a piece of them",
                    label=f"leaves its output as `{first.got.describe()}`",
                    help=["gather the features: `colwise(output = replicate)`"],
                )
            elif first.kind == "norm_dim":
                yield self._over_dim(analysis, span, items)
            else:
                assert first.wanted is not None
                yield self.at(
                    span,
                    f"{named(analysis, items)} {verb(analysis, items, 'expects', 'expect')} `{text_of(first.wanted)}`, "
                    f"and `{first.got.describe()}` arrives from {came_from(analysis, first.got)}",
                    label=_expectation(first),
                    others=producer_lines(first.got, beside=span),
                    help=_cures(analysis, first),
                    fix=_fix(first),
                )

    def _over_dim(self, analysis: Analysis, span: Span, items: list[Mismatch]) -> Diagnostic:
        """`sequence` along the dim that a norm or a linear layer takes whole."""
        got, dim = items[0].got, _dim(items[0])
        assert analysis.manifest is not None
        if analysis.manifest.modules[items[0].path].kind == "norm":
            over = f"over which {named(analysis, items)} {verb(analysis, items, 'takes', 'take')} a norm"
        else:
            over = f"which {named(analysis, items)} {verb(analysis, items, 'multiplies', 'multiply')}"
        if got.moved:
            problem, help = f"may cut dim {dim} of [tokens, features], {over}", "dim 0 of rows are the tokens"
        else:
            problem = f"cuts dim {dim} of a tensor of {got.rank} dims, {over}"
            help = "the sequence is dim 1 of [batch, sequence, features]"
        write = "sequence(dim = 0, …)" if got.moved else "sequence"
        return self.at(span, f"`sequence` {problem}", label="not the sequence dim", help=[f"{help}: write `{write}`"])

    def _mixed(self, analysis: Analysis, span: Span, item: Mismatch) -> Diagnostic:
        assert item.other is not None
        one, other = item.got, item.other
        first, second = _in_words(one, beside=other), _in_words(other, beside=one)
        return self.at(
            span,
            f"in {named(analysis, [item])} a tensor in layout {first}, from {came_from(analysis, one)}, is combined "
            f"with one in layout {second}, from {came_from(analysis, other)}",
            label=f"`{(one if leaves_at(one, span) else other).describe()}`",
            others=producer_lines(one, other, beside=span),
            help=[_in_one_layout(analysis, one, other)],
        )


def _dim(item: Mismatch) -> int:
    assert isinstance(item.wanted, Sharded)
    return item.wanted.dim


def _in_words(tensor: Tensor, *, beside: Tensor) -> str:
    """A layout, with the number of dims where that of the other tensor is another."""
    dims = f" of {tensor.rank} dims" if _aligned_apart(tensor, beside) and tensor.state == "shard" else ""
    return f"`{tensor.describe()}`{dims}"


def _aligned_apart(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to have different numbers of dims, so that one dim has a number in each."""
    return None not in (one.rank, other.rank) and one.rank != other.rank


def _in_one_layout(analysis: Analysis, one: Tensor, other: Tensor) -> str:
    """The layouts in which two tensors are best added: cut along the sequence where one is, else whole."""
    narrow, wide = sorted((one, other), key=lambda item: item.rank or 0)
    if not _aligned_apart(one, other):
        cut = next((item.describe() for item in (one, other) if item.state == "shard" and item.dim == 1), "replicate")
        return f"give both outputs one layout, for instance `output = {cut}`"
    assert narrow.rank is not None and wide.rank is not None
    dim = 1 + narrow.rank - wide.rank
    if dim < 0 or not any(item.cut_from_last == 1 - wide.rank for item in (one, other)):
        return "give both outputs one layout, for instance `output = replicate`"
    few, many = came_from(analysis, narrow), came_from(analysis, wide)
    return (
        f"tensors are aligned at their last dims: dim {dim} of the {narrow.rank} dims from {few} is dim 1 of the "
        f"{wide.rank} from {many}; write `output = shard({dim})` for {few} and `output = shard(1)` for {many}"
    )


def _expectation(item: Mismatch) -> str:
    assert item.wanted is not None
    return (
        f"expects `{text_of(item.wanted)}`"
        if item.rule is not None
        else f"leaves its output as `{item.got.describe()}`"
    )


def _cures(analysis: Analysis, item: Mismatch) -> list[str]:
    """What to write: at the consumer, and at the producer."""
    assert item.wanted is not None
    got, wanted = item.got.describe(), text_of(item.wanted)
    style = _style_of(item)
    cures = []
    if isinstance(style, Inputs | Outputs):
        cures.append(f"write `from = {got}`")
    elif isinstance(style, Colwise | Rowwise) and got != "partial":
        cures.append(f"write `{style.name}(input = {got})`")
    elif isinstance(style, SequenceStyle):
        cures.append("leave the module without a style, where its input is whole")
    source = item.got.source
    if source is not None and isinstance(source.rule.treatment if source.rule else None, Colwise | Rowwise):
        cures.append(f"or let {came_from(analysis, item.got)} leave it so: `output = {wanted}`")
    elif source is not None and source.rule is None:
        cures.append(f"or give {came_from(analysis, item.got)} a style whose output is `{wanted}`")
    return cures


def _style_of(item: Mismatch) -> Any:
    """Return the consumer's style; for one that converts inputs and outputs, the half with the expected layout."""
    style = item.rule.treatment if item.rule is not None else None
    return next((half for half in conversions(style) if item.wanted in as_list(half.source)), style)


def _fix(item: Mismatch) -> Fix | None:
    """Describe the input's layout, where the style states another one explicitly."""
    style = _style_of(item)
    if not isinstance(style, Inputs | Outputs) or isinstance(style.source, tuple):
        return None
    return replacement(style, "source", item.got.describe())


class UnpairedStyle(LayoutRule, Check):
    """A `colwise` layer without its `rowwise`, or the reverse.

    `colwise` leaves each rank with a shard of the features, and `rowwise` takes such shards and sums its results. A
    layer without a style has full weights, and cannot use a shard.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { layers.*.feed_forward.{w1, w3} = colwise }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.feed_forward.{w1, w3} = colwise
      layers.*.feed_forward.w2       = rowwise
    }
    ```
    """

    code = "LP411"
    slug = "unpaired-style"
    kinds = ("unpaired",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            first = items[0]
            consumer, producer = named(analysis, items), came_from(analysis, first.got)
            if first.rule is None:
                yield self.at(
                    span,
                    f"{consumer} {verb(analysis, items, 'has', 'have')} whole weights, and a piece of the features "
                    f"arrives from {producer}",
                    label=f"leaves its output as `{first.got.describe()}`",
                    help=[
                        f"give {consumer} the style `rowwise`",
                        "or gather the features: `colwise(output = replicate)`",
                    ],
                )
            else:
                yield self.at(
                    span,
                    f"{consumer} {verb(analysis, items, 'expects', 'expect')} a piece of the features, and all of them "
                    f"arrive from {producer}",
                    label="expects `shard(-1)`",
                    others=producer_lines(first.got, beside=span),
                    help=["give the layers before it the style `colwise`", "or write `rowwise(input = replicate)`"],
                )


class PartlyShardedAttention(LayoutRule, Check):
    """Attention of which only some of queries, keys and values are cut, or that sees only a piece of the sequence.

    Each rank must hold the key/value heads that its query heads attend to. With grouped-query attention, wrong heads
    are combined without an error. And every query must see all keys before it, so the sequence must be complete before
    attention, unless it is sharded by `context`.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp {
      layers.*.attention.wq = colwise
      layers.*.attention.wo = rowwise
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

    code = "LP417"
    slug = "partly-sharded-attention"
    kinds = ("heads",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            first = items[0]
            where = named(analysis, items)
            if first.other is None:
                yield self.at(
                    span,
                    f"the attention of {where} sees a piece of the sequence only",
                    label=f"leaves its output as `{first.got.describe()}`",
                    help=[f"gather the sequence before: {where} = `inputs(from = shard(1), to = replicate)`"],
                )
                continue
            yield self.at(
                span,
                f"in {where} the heads of {came_from(analysis, first.got)} are cut over the ranks, and those of "
                f"{came_from(analysis, first.other)} are not",
                label="cut by heads",
                others=producer_lines(first.other, beside=span),
                help=["give queries, keys and values the same style"],
            )


class FusedLayerSplit(LayoutRule, Check):
    """A fused layer under `colwise`, whose output the model then splits.

    `colwise` gives each rank one contiguous shard of the output features. Where the model splits them into, for
    example, queries, keys and values, the first rank has queries where another has values, and the numbers are wrong.
    That is so for `chunk` as for `glu`, slices, and views of which the parts are the outermost dim; a view whose
    outermost dim are the heads, each with its query, key and value, is cut between heads.
    """

    code = "LP418"
    slug = "fused-layer-split"
    kinds = ("fused",)

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for span, items in self.mismatches(analysis):
            yield self.at(
                span,
                f"{named(analysis, items)} splits the output of {came_from(analysis, items[0].got)}, of which each "
                "rank has one contiguous piece",
                label="cuts across the parts",
                help=["use a model with a layer for each part", "or gather the output: `colwise(output = replicate)`"],
            )
