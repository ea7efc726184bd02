"""`batch`: rules about the global batch, the micro batch and the length of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import samples_at_once
from legoai.dsl.analysis.facts import replacement
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.models.reads import Images


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

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        batch, mesh = analysis.plan.batch, analysis.plan.mesh
        each = samples_at_once(analysis.plan)
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
            analysis.span_of(batch, "global_batch"),
            f"a global batch of {batch.global_batch} sequences cannot be cut into micro batches of "
            f"{batch.micro_batch} on {mesh.data_parallel} data-parallel ranks",
            label=f"no multiple of {batch.micro_batch} · {mesh.data_parallel} = {each}",
            others=[
                Label(analysis.span_of(batch, "micro_batch"), "the micro batch"),
                *(
                    [Label(analysis.span_of(mesh, axis), f"{mesh.data_parallel} ranks")]
                    if mesh.data_parallel > 1
                    else []
                ),
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

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        batch, manifest = analysis.plan.batch, analysis.manifest
        longest = manifest.max_seq_len if manifest is not None else None
        if longest is None or batch.length <= longest:
            return
        yield self.at(
            analysis.span_of(batch, "seq_len"),
            f"sequences of {batch.length} tokens are longer than the model's positions reach: {longest}",
            label=f"at most {longest}",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), f"knows {longest} positions")],
            help=["shorten the sequences, or give the model more positions (`max_seq_len` in the built-in models)"],
            fix=replacement(batch, "seq_len", str(longest)),
        )


class ImageTokens(Check):
    """A sequence length for a model that reads only images.

    How many tokens it computes with follows from the model: one for each patch of the image, and the class token.

    ## Example
    ```
    model vit("b16")
    batch (global = 256, micro = 8, seq_len = 1024)
    ```

    ## Use instead
    ```
    model vit("b16")
    batch (global = 256, micro = 8)
    ```
    """

    code = "LP603"
    slug = "image-sequence"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        batch, manifest = analysis.plan.batch, analysis.manifest
        reads = manifest.reads if manifest is not None else None
        if not isinstance(reads, Images) or batch.seq_len is None:
            return
        yield self.at(
            analysis.span_of(batch, "seq_len"),
            f"`seq_len` has no effect: the model reads images of {reads.height} by {reads.width}, and no sequences",
            label="no sequence is read",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), "a model of images")],
            help=["leave `seq_len` out: what is computed for an image follows from the model"],
        )


class SequenceMissing(Check):
    """A model that reads text, and a batch that does not say how long sequences are.

    ## Example
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1)
    ```

    ## Use instead
    ```
    model gpt2("xl")
    batch (global = 256, micro = 1, seq_len = 1024)
    ```
    """

    code = "LP604"
    slug = "sequence-missing"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        batch, manifest = analysis.plan.batch, analysis.manifest
        reads = manifest.reads if manifest is not None else None
        if reads is None or not reads.has_text or batch.seq_len is not None:
            return
        longest = manifest.max_seq_len if manifest is not None else None
        yield self.at(
            analysis.span_of(batch),
            "`batch` does not say how long sequences are, and the model reads text",
            label="no `seq_len`",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), "a model of text")],
            help=[f"write `seq_len = …`, {'a number of tokens' if longest is None else f'at most {longest}'}"],
        )


class RampDivides(Check):
    """A global batch of a ramp that is no multiple of the micro batch times the data-parallel degree.

    The micro batch and the mesh stay while the batch grows; only the number of accumulated micro batches changes.

    ## Example
    ```
    batch (global = 256, micro = 2, seq_len = 8192, ramp = stages(global = [32, 128], until = [1000, 2000]))
    mesh  (dp_shard = 32)
    ```

    ## Use instead
    ```
    batch (global = 256, micro = 2, seq_len = 8192, ramp = stages(global = [64, 128], until = [1000, 2000]))
    mesh  (dp_shard = 32)
    ```
    """

    code = "LP605"
    slug = "ramp-not-divisible"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        ramp, each = plan.batch.ramp, samples_at_once(plan)
        if ramp is None or plan.batch.global_batch % each:
            return
        wrong = [batch for batch in ramp.batches if batch % each]
        if wrong:
            yield self.at(
                analysis.span_of(ramp, "batches"),
                f"a global batch of {wrong[0]} sequences cannot be cut into micro batches of {plan.batch.micro_batch} "
                f"on {plan.mesh.data_parallel} data-parallel ranks",
                label=f"no multiple of {plan.batch.micro_batch} · {plan.mesh.data_parallel} = {each}",
                others=[Label(analysis.span_of(plan.batch, "micro_batch"), "the micro batch stays")],
                help=[f"give multiples of {each} below {plan.batch.global_batch}"],
            )


class RampGrows(Check):
    """A ramp whose stages do not follow each other: batches or steps that do not grow, or not one step for each batch.

    ## Example
    ```
    batch (global = 256, micro = 1, seq_len = 8192, ramp = stages(global = [128, 64], until = [1000, 2000]))
    ```

    ## Use instead
    ```
    batch (global = 256, micro = 1, seq_len = 8192, ramp = stages(global = [64, 128], until = [1000, 2000]))
    ```
    """

    code = "LP606"
    slug = "ramp-does-not-grow"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        batch = analysis.plan.batch
        ramp = batch.ramp
        if ramp is None:
            return
        if len(ramp.batches) != len(ramp.until) or not ramp.batches:
            yield self.at(
                analysis.span_of(ramp, "until"),
                f"{len(ramp.batches)} batches and {len(ramp.until)} steps: each stage has one of both",
                label=f"{len(ramp.until)} steps",
                others=[Label(analysis.span_of(ramp, "batches"), f"{len(ramp.batches)} batches")],
                help=["`until` says for each batch the step after which it ends"],
            )
            return
        sizes = (*ramp.batches, batch.global_batch)
        if any(after <= before for before, after in pairwise(sizes)):
            yield self.at(
                analysis.span_of(ramp, "batches"),
                "the batches of a ramp grow, up to the full one",
                label="does not grow",
                others=[Label(analysis.span_of(batch, "global_batch"), "the full batch")],
                help=["give growing batches, the last below `global`"],
            )
        if any(after <= before for before, after in pairwise(ramp.until)):
            yield self.at(
                analysis.span_of(ramp, "until"),
                "the steps at which the stages of a ramp end follow each other",
                label="does not grow",
                help=["they are counted from the first step of the training"],
            )


class RampNeverEnds(Check):
    """A ramp that lasts as long as the training, so that the full batch is never reached.

    ## Example
    ```
    batch (global = 256, micro = 1, seq_len = 8192, ramp = stages(global = [64, 128], until = [1000, 2000]))
    steps 2000
    ```

    ## Use instead
    ```
    batch (global = 256, micro = 1, seq_len = 8192, ramp = stages(global = [64, 128], until = [1000, 2000]))
    steps 20000
    ```
    """

    code = "LP607"
    slug = "ramp-never-ends"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        ramp, form = plan.batch.ramp, plan.schedule.form
        if ramp is None or not ramp.until:
            return
        place, steps = analysis.span_of(form, "steps"), getattr(form, "steps", None)
        if plan.steps is not None:
            place, steps = analysis.span_of(plan.steps, "count"), plan.steps.count
        if steps is None or ramp.until[-1] < steps:
            return
        yield self.at(
            analysis.span_of(ramp, "until"),
            f"the full batch is never reached: its ramp ends after step {ramp.until[-1]}, the training after {steps}",
            label="lasts as long as the training",
            others=[Label(place, f"{steps} steps")],
            help=["let the ramp end earlier, or train longer"],
        )


def pass_label(analysis: Analysis) -> Label:
    """Return the span that determines the number of micro batches of a pass, for diagnostics about it."""
    pipeline = analysis.plan.pipeline
    if pipeline is None or pipeline.microbatches is None:
        return batch_label(analysis)
    return Label(analysis.span_of(pipeline, "microbatches"), f"{pipeline.microbatches} micro batches in a pass")


def batch_label(analysis: Analysis) -> Label:
    """Return the span that determines the number of micro batches of a rank, for diagnostics about it."""
    batch, mesh = analysis.plan.batch, analysis.plan.mesh
    return Label(
        analysis.span_of(batch, "global_batch"),
        f"{batch.global_batch} sequences in micro batches of {batch.micro_batch} over {mesh.data_parallel} ranks",
    )
