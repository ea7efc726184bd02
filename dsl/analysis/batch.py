"""Sizes of a batch: samples and tokens of a micro batch, micro batches of one rank and of one pass of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def pass_micro_batches(plan: Plan) -> int | None:
    """Micro batches in one pass of the pipeline's schedule: what `pipeline` says, or else all that the batch gives."""
    pipeline = plan.pipeline
    return micro_batches(plan) if pipeline is None or pipeline.microbatches is None else pipeline.microbatches


def passes(plan: Plan) -> int | None:
    """How often a step goes through the pipeline's schedule; None where the passes do not come out even."""
    count, each = micro_batches(plan), pass_micro_batches(plan)
    return None if count is None or each is None or count % each else count // each


def local_tokens(plan: Plan) -> int:
    """Tokens of one micro batch on one rank: its piece of each sequence under context parallelism."""
    return plan.batch.micro_batch * plan.batch.length // plan.mesh.cp
