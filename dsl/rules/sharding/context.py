"""`context`: rules about sequences in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.computation.attention import attention_heads, attention_modules
from legoai.dsl.analysis.facts import written
from legoai.dsl.analysis.magnitudes.trained import embedding_with
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.sharding.divisibility import cuts


class SequenceOverContext(Check):
    """A sequence that the ranks of `cp` cannot share evenly.

    Every rank holds an equal shard of each sequence. Under `balance = head_tail` it holds two: one from the front and
    one from the back, where causal attention has more to compute; then twice the number of ranks must divide the
    sequence.

    ## Example
    ```
    batch (global = 256, micro = 1, seq_len = 8196)
    mesh  (dp_shard = 8, cp = 4)
    fsdp on dp_shard, cp { layers.* = unit, root = unit }
    context on cp (balance = head_tail)
    ```

    ## Use instead
    ```
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 8, cp = 4)
    fsdp on dp_shard, cp { layers.* = unit, root = unit }
    context on cp (balance = head_tail)
    ```
    """

    code = "LP405"
    slug = "sequence-over-context"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use, mesh, batch = analysis.plan.context, analysis.plan.mesh, analysis.plan.batch
        if use is None or mesh.cp == 1:
            return
        balanced = use.dealt == "head_tail"
        pieces = 2 * mesh.cp if balanced else mesh.cp
        if batch.length % pieces == 0:
            return
        others = [Label(analysis.span_of(mesh, "cp"), f"{mesh.cp} ranks")]
        if balanced:
            default = "" if written(use, "balance") else ", by default"
            others.append(Label(analysis.span_of(use, "balance"), f"two pieces for each rank{default}"))
        near = max(pieces, batch.length // pieces * pieces)
        yield self.at(
            analysis.span_of(batch, "seq_len"),
            f"a sequence of {batch.length} tokens cannot be cut into {pieces} equal pieces",
            label=f"{batch.length} tokens",
            others=others,
            help=[f"`seq_len` must be a multiple of {pieces}, such as {near}"],
        )


class HeadsOverContext(Check):
    """Heads that the ranks of `cp` cannot share.

    Under `rotate = heads` each rank attends with a share of the heads to whole sequences: with those that `tp` leaves
    it, divided by the ranks of `cp`. With grouped-query attention the fewer key/value heads set the limit.

    ## Example
    ```
    model llama3("8b")
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 2, cp = 16)
    fsdp on dp_shard, cp { layers.* = unit, root = unit }
    context on cp (rotate = heads)
    ```

    ## Use instead
    ```
    model llama3("8b")
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 4, cp = 8)
    fsdp on dp_shard, cp { layers.* = unit, root = unit }
    context on cp (rotate = heads)
    ```
    """

    code = "LP426"
    slug = "heads-over-context"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use, mesh, manifest = analysis.plan.context, analysis.plan.mesh, analysis.manifest
        if use is None or manifest is None or mesh.cp == 1 or use.rotate != "heads":
            return
        cut = {(item.attention.path, item.heads): mesh.tp for item in cuts(analysis) if item.attention is not None}
        for path in attention_modules(analysis):
            for name, heads in attention_heads(analysis, path).items():
                parts = cut.get((path, name), 1)
                if heads % parts or heads // parts % mesh.cp == 0:
                    continue  # sizes that `tp` does not divide are reported by another rule
                beside = f", of which `tp` leaves a rank {heads // parts}" if parts > 1 else ""
                yield self.at(
                    analysis.span_of(use, "rotate"),
                    f"{mesh.cp} ranks cannot share the {heads} heads (`{name}`) of `{general(manifest, path)}`{beside}",
                    label="each rank attends with a share of the heads",
                    others=[Label(analysis.span_of(mesh, "cp"), f"{mesh.cp} ranks")],
                    help=[f"`cp` must divide {heads // parts}, or keys must travel, as with `rotate = allgather`"],
                )
                return


class BalanceOfHeads(Check):
    """Pieces from front and back under `rotate = heads`, where they even out nothing.

    Each rank attends to whole sequences, so that causal work is equal however their tokens are dealt. In order they
    need not be sorted first.

    ## Example
    ```
    mesh  (dp_shard = 8, cp = 4)
    fsdp on dp_shard, cp { layers.* = unit, root = unit }
    context on cp (rotate = heads, balance = head_tail)
    ```

    ## Use instead
    ```
    mesh  (dp_shard = 8, cp = 4)
    fsdp on dp_shard, cp { layers.* = unit, root = unit }
    context on cp (rotate = heads)
    ```
    """

    code = "LP427"
    slug = "balance-of-heads"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use = analysis.plan.context
        if use is None or analysis.plan.mesh.cp == 1 or use.rotate != "heads":
            return
        if not written(use, "balance") or use.balance != "head_tail":
            return
        yield self.at(
            analysis.span_of(use, "balance"),
            "`balance = head_tail` evens out nothing: every rank attends to whole sequences",
            label="sequences are dealt in order",
            others=[Label(analysis.span_of(use, "rotate"), "with a share of the heads each")],
            help=["leave `balance` out"],
        )


class NothingToCut(Check):
    """Context parallelism for a model without attention over a sequence of tokens.

    It shards the sequences of token ids in the batch, and lets attention see the other ranks' keys and values. A model
    that makes its own sequence, such as a vision transformer from patches, or one without attention, has nothing to
    shard.

    ## Example
    ```
    model vit("b16")
    batch (global = 256, micro = 1)
    mesh  (dp_shard = 16, cp = 2)
    fsdp on dp_shard { layers.* = unit, root = unit }
    context on cp
    ```

    ## Use instead
    ```
    model vit("b16")
    batch (global = 256, micro = 1)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP310"
    slug = "nothing-to-cut"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, use = analysis.manifest, analysis.plan.context
        if use is None or manifest is None or manifest.flow_error is not None or analysis.plan.mesh.cp == 1:
            return
        attends = bool(attention_modules(analysis))
        if attends and manifest.vocab_size is not None and manifest.reads_tokens:
            return
        reason = "reads no sequence of token ids" if attends else "has no attention that is known as such"
        yield self.at(
            analysis.span_of(use, "axes"),
            f"`context on cp` cuts sequences of tokens between the ranks of attention, and the model {reason}",
            label="nothing to cut",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), "this model")],
            help=["use the devices for `dp_shard` or `tp`"],
        )


class TokensCombined(Check):
    """Context parallelism for a model that combines tokens other than by attention.

    A rank of `cp` has a piece of each sequence, or two from its front and its back. Attention sees the other ranks'
    keys and values. A convolution along the sequence, a shift by one token, a cumulative sum, a mean over tokens, a
    recurrence, or attention that is written out as products and a softmax sees the rank's own tokens alone, and
    computes something else without an error.

    Not `context on cp` for a model whose blocks begin with `torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]`, but the
    same devices on `dp_shard` or `tp`. What routed experts do with tokens is not looked at: they sort and count them.
    Likewise an index along the sequence is reported where it is the same for all sequences, as in
    `x[:, torch.arange(x.shape[1]).flip(0)]`, and not where the model computes it from its tokens or activations. What
    the model's result and buffers do not depend on is not reported: statistics that are kept for a log.
    """

    code = "LP318"
    slug = "tokens-combined"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, use = analysis.manifest, analysis.plan.context
        if use is None or manifest is None or analysis.plan.mesh.cp == 1 or not attention_modules(analysis):
            return
        found = next((module for module in manifest.modules.values() if module.mixes_tokens), None)
        if found is not None:
            where = f"`{general(manifest, found.path)}`" if found.path else "the model's forward"
            yield self.at(
                analysis.span_of(use, "axes"),
                f"`context on cp` cuts sequences, and {where} combines tokens by `{found.mixes_tokens}`, "
                "which would see those of one rank alone",
                label="only attention sees the tokens of other ranks",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), "this model")],
                help=["use the devices for `dp_shard` or `tp`"],
            )


class CountedOnPieces(Check):
    """Context parallelism for an embedding that divides its gradient by how often each token occurs.

    `nn.Embedding(…, scale_grad_by_freq = True)` counts the tokens that it is given, which on ranks of `cp` are those of
    a piece of each sequence.
    """

    code = "LP320"
    slug = "counted-on-pieces"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        use = analysis.plan.context
        if use is None or analysis.plan.mesh.cp == 1:
            return
        found = embedding_with(analysis, "scale_grad_by_freq")
        if found is not None:
            yield self.at(
                analysis.span_of(use, "axes"),
                f"`context on cp` cuts sequences, and `{found}` scales its gradient by how often each token occurs "
                "(`scale_grad_by_freq`), which would be counted in the pieces of one rank alone",
                label="counts the tokens of one rank",
                others=[Label(analysis.span_of(analysis.plan.model, "family"), "this model")],
                help=["use the devices for `dp_shard` or `tp`"],
            )
