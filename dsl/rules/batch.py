"""`batch`: rules about the global batch, the micro batch and the length of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.context import Context
from legoai.dsl.diagnostics import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.facts import replacement


class BatchDivides(Check):
    """A global batch that is no multiple of the micro batch times the data-parallel degree.

    Each of the `dp_replicate · dp_shard` data-parallel ranks computes the same number of micro batches in a
    step: `global = micro · dp_replicate · dp_shard · accumulation`.

    ## Example
    ```
    batch (global = 100, micro = 2, seq_len = 8192)
    mesh  (dp_shard = 32)
    ```

    ## Use instead
    ```
    batch (global = 128, micro = 2, seq_len = 8192)
    mesh  (dp_shard = 32)
    ```
    """

    code = "LP601"
    slug = "batch-not-divisible"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        batch, mesh = context.plan.batch, context.plan.mesh
        each = batch.micro_batch * mesh.data_parallel
        below, rest = divmod(batch.global_batch, each)
        if rest == 0:
            return
        near = " and ".join(str(count * each) for count in (below, below + 1) if count)
        help = [
            f"the nearest legal global batches are {near}" if below else f"the smallest legal global batch is {near}"
        ]
        share, uneven = divmod(batch.global_batch, mesh.data_parallel)
        if not uneven:
            micros = [size for size in range(1, share + 1) if share % size == 0]
            legal = ", ".join(map(str, micros[:12])) + (", …" if len(micros) > 12 else "")
            help.append(f"with this global batch, legal micro batches are {legal}")
        axis = "dp_shard" if mesh.dp_shard > 1 else "dp_replicate"
        yield self.at(
            context.place(batch, "global_batch"),
            f"a global batch of {batch.global_batch} sequences cannot be cut into micro batches of "
            f"{batch.micro_batch} on {mesh.data_parallel} data-parallel ranks",
            label=f"no multiple of {batch.micro_batch} · {mesh.data_parallel} = {each}",
            others=[
                Label(context.place(batch, "micro_batch"), "the micro batch"),
                *([Label(context.place(mesh, axis), f"{mesh.data_parallel} ranks")] if mesh.data_parallel > 1 else []),
            ],
            help=help,
        )


class SequenceFits(Check):
    """Sequences that are longer than the model's positions reach.

    Learned positions have no entry beyond the last, and a rotary table ends where it was made to end.

    ## Example
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 8192)
    ```

    ## Use instead
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    ```
    """

    code = "LP602"
    slug = "sequence-too-long"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        batch, manifest = context.plan.batch, context.manifest
        longest = manifest.max_seq_len if manifest is not None else None
        if longest is None or batch.seq_len <= longest:
            return
        yield self.at(
            context.place(batch, "seq_len"),
            f"sequences of {batch.seq_len} tokens are longer than the model's positions reach: {longest}",
            label=f"at most {longest}",
            others=[Label(context.place(context.plan.model, "family"), f"knows {longest} positions")],
            help=["shorten the sequences, or give the model more positions (`max_seq_len` in the built-in models)"],
            fix=replacement(batch, "seq_len", str(longest)),
        )


class ImageTokens(Check):
    """A sequence length that a vision model does not have.

    The length follows from the model: a token for each patch of the image, and the class token.

    ## Example
    ```
    model vit("b16")
    batch (global = 256, micro = 8, seq_len = 1024)
    ```

    ## Use instead
    ```
    model vit("b16")
    batch (global = 256, micro = 8, seq_len = 197)
    ```
    """

    code = "LP603"
    slug = "image-sequence"
    severity = "warning"

    def check(self, context: Context) -> Iterator[Diagnostic]:
        from legoai.specs.models.configs import ConfigError, ViTConfig, resolve_config

        model, batch = context.plan.model, context.plan.batch
        if model.family != "vit":
            return
        try:
            config = resolve_config(model.family, model.target, model.arguments)
        except ConfigError:
            return
        assert isinstance(config, ViTConfig)
        if batch.seq_len == config.n_tokens:
            return
        yield self.at(
            context.place(batch, "seq_len"),
            f"`seq_len` has no effect: the model makes {config.n_tokens} tokens of an image",
            label=f"always {config.n_tokens}",
            others=[
                Label(context.place(model, "family"), f"images of {config.image_size}, patches of {config.patch_size}")
            ],
            help=[f"write `seq_len = {config.n_tokens}`, so that the plan says what is computed"],
            fix=replacement(batch, "seq_len", str(config.n_tokens)),
        )
