"""`context`: context parallelism, a sequence in pieces on different ranks."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import AxisUse, Directive, option
from legoai.specs.directives.kinds import Choice


class Context(Directive):
    """Context parallelism: a piece of each sequence on each rank; attention sees the other pieces' keys and values.

    The model's forward takes the places of its tokens as `positions`, and attends by `scaled_dot_product_attention`.
    """

    keyword: ClassVar[str] = "context"
    axis_use: ClassVar[AxisUse | None] = AxisUse(("cp",))

    rotate: str = option(
        Choice(("allgather", "alltoall")),
        doc="How keys and values reach the other ranks: all at once, or piece by piece around the ring.",
        default="allgather",
    )
    balance: str = option(
        Choice(("head_tail", "none")),
        doc="`head_tail` gives each rank a piece from the front and one from the back, so that causal work is equal.",
        default="head_tail",
    )
