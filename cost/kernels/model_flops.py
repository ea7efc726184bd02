"""Floating-point operations of a model in one step, independent of how it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from legoai.cost.trace.records import Kernel
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.dsl.analysis.magnitudes.flops import DECODERS, FORMULA, FORWARD_AND_BACKWARD, flops_per_token
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

CAPTURED: Final = "3 times the forward products that were captured, on all ranks"


def model_flops(plan: Plan, manifest: Manifest, steps: Sequence[Sequence[Item]]) -> tuple[float, str]:
    """Return the floating-point operations of the model in one optimizer step, on all devices, and the convention.

    For the built-in decoders they follow from the model
    (:func:`~legoai.dsl.analysis.magnitudes.flops.flops_per_token`). For other models it is three times the products of
    a captured rank's forward, times the ranks; work that several ranks repeat counts for each of them. Recomputation
    never counts.

    Args:
        plan: the plan.
        manifest: of its model.
        steps: the items of one step, of one rank for each stage of a pipeline.
    """
    if plan.model.family in DECODERS:
        length = plan.batch.seq_len
        assert length is not None, "a decoder reads sequences"
        tokens = plan.batch.global_batch * length
        return float(tokens * flops_per_token(manifest, length)), FORMULA
    forward = sum(_forward(item) for items in steps for item in items)
    return float(FORWARD_AND_BACKWARD * forward * plan.mesh.world_size / len(steps)), CAPTURED


class ForwardFlops:
    """Forward FLOPs of a segment's kernels."""

    def __init__(self, segment: Segment) -> None:
        self.total = sum(map(_forward, segment.records))


def _forward(item: Item) -> int:
    """Return the forward FLOPs of an item of a trace."""
    if isinstance(item, Instance):
        return item.segment.summary(ForwardFlops).total
    return item.flops if isinstance(item, Kernel) and item.phase == "forward" else 0
