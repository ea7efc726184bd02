"""`context`: context parallelism, a sequence sharded over ranks."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import AxisUse, Directive, option
from legoai.specs.directives.kinds import Choice


class Context(Directive):
    """Context parallelism: each rank holds a shard of each sequence; attention covers the whole sequence.

    The model's forward takes the positions of its tokens as `positions`, and uses `scaled_dot_product_attention`.
    """

    keyword: ClassVar[str] = "context"
    axis_use: ClassVar[AxisUse | None] = AxisUse(("cp",))

    rotate: str = option(
        Choice(("allgather", "alltoall", "heads")),
        doc=(
            "What attention receives from the other ranks: their keys and values, all at once or shard by shard around "
            "the ring (`alltoall`); or, with `heads`, whole sequences of a share of the heads (Ulysses)."
        ),
        default="allgather",
    )
    balance: str = option(
        Choice(("head_tail", "none")),
        doc=(
            "`head_tail` gives each rank a shard from the front and one from the back, so that causal work is equal. "
            "With `rotate = heads` it is equal anyway, and shards are in order."
        ),
        default="head_tail",
    )

    @property
    def dealt(self) -> str:
        """Assignment of shards to ranks: `head_tail` or `none`."""
        return "none" if self.rotate == "heads" else self.balance
