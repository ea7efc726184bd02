"""Sizes of a batch: samples and tokens of a micro batch, micro batches of one rank and of one pass of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.model import FOREIGN
from legoai.specs.models.reads import TwoTexts

if TYPE_CHECKING:
    from legoai.dsl.analysis.analysis import Analysis
    from legoai.specs.models.manifests.manifest import Manifest
    from legoai.specs.plan import Plan


def samples_at_once(plan: Plan) -> int:
    """Samples in one micro batch of all data-parallel ranks together."""
    return plan.batch.micro_batch * plan.mesh.data_parallel


def micro_batches(plan: Plan) -> int | None:
    """Micro batches that one data-parallel rank computes in a step; None where the batch does not divide.

    `global = micro · data-parallel degree · micro batches`.
    """
    count, rest = divmod(plan.batch.global_batch, samples_at_once(plan))
    return count if rest == 0 else None


def ramp_stages(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The stages of the batch's ramp: the step at which each ends, and its global batch; none without a ramp."""
    ramp = plan.batch.ramp
    return () if ramp is None else tuple(zip(ramp.until, ramp.batches, strict=False))


def global_batch_at(plan: Plan, step: int) -> int:
    """Samples in an optimizer step, counted from 0."""
    return next((batch for until, batch in ramp_stages(plan) if step < until), plan.batch.global_batch)


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """A ramp without a pipeline."""
    batch = analysis.plan.batch
    if batch.ramp is not None and is_staged(analysis):
        yield Unsupported(
            analysis.span_of(batch, "ramp"),
            "a ramp of the batch under a pipeline is not lowered yet: its schedule divides gradients by a fixed number "
            "of micro batches",
            help=("leave `ramp` out, or train the first steps without a pipeline and load their checkpoint",),
        )


def pass_micro_batches(plan: Plan) -> int | None:
    """Micro batches in one pass of the pipeline's schedule: from `pipeline`, or else all of the batch."""
    pipeline = plan.pipeline
    return micro_batches(plan) if pipeline is None or pipeline.microbatches is None else pipeline.microbatches


def passes(plan: Plan) -> int | None:
    """Number of passes of the pipeline's schedule in a step; None where it is not an integer."""
    count, each = micro_batches(plan), pass_micro_batches(plan)
    return None if count is None or each is None or count % each else count // each


def local_tokens(plan: Plan) -> int:
    """Tokens of one micro batch on one rank: its piece of each sequence under context parallelism."""
    return plan.batch.micro_batch * plan.batch.length // pieces_of_sequence(plan)


def pieces_of_sequence(plan: Plan) -> int:
    """Ranks that share each sequence: those of `cp`, which see whole sequences where no statement uses the axis."""
    ranks = plan.mesh.cp  # a hole is undecided whether a statement uses the axis or not
    return 1 if plan.context is None else ranks


def sequence_length(plan: Plan, manifest: Manifest) -> int | None:
    """Tokens of a sequence in the model's blocks; None where the number for an image is not known.

    Raises:
        Undecided: the model reads text, and the plan does not decide its length.
    """
    if manifest.reads_tokens or isinstance(manifest.reads, TwoTexts):
        return plan.batch.length
    if plan.model.family in FOREIGN:
        return None
    tokens: int | None = getattr(plan.model.source().config(), "n_tokens", None)
    return tokens
