"""`replicate`: plain data parallelism."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import AxisUse, Directive, option
from legoai.specs.directives.kinds import Choice, Size
from legoai.specs.units import MIB


class ReplicateUse(Directive):
    """Whole replicas whose gradients are reduced in buckets (DDP)."""

    keyword: ClassVar[str] = "replicate"
    axis_use: ClassVar[AxisUse | None] = AxisUse(("dp_replicate",))

    bucket: int = option(
        Size(),
        doc=(
            "Bytes of gradients in one all-reduce, at least: a bucket is of whole blocks, filled from the end of the "
            "model. What does not fill a bucket is reduced last."
        ),
        default=25 * MIB,
    )
    optimizer: str = option(
        Choice(("replicated", "sharded")),
        doc="`sharded` keeps each optimizer state on one rank only (ZeRO-1): each updates its rows of every parameter.",
        default="replicated",
    )
