"""`loss`: the form in which the loss is computed from the last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, Treatment, option
from legoai.specs.directives.kinds import Boolean, Integer


class EagerLoss(Treatment):
    """Cross entropy in fp32 on all logits at once."""

    name: ClassVar[str] = "eager"


class FusedLoss(Treatment):
    """Cross entropy compiled to one kernel, without a copy of the logits in fp32. Not under `backend = graph`."""

    name: ClassVar[str] = "fused"


class ChunkedLoss(Treatment):
    """Cross entropy in pieces of the sequence, so that only one piece's logits in fp32 are alive.

    Not under `backend = graph`.
    """

    name: ClassVar[str] = "chunked"

    n: int = option(Integer(minimum=2), doc="The number of pieces.")
    last_layer: bool = option(
        Boolean(),
        doc=(
            "Compute the model's last layer in the pieces too, so that only one piece's logits are alive; its "
            "gradients are computed in forward, and summed over the pieces in the dtype of its weights."
        ),
        default=False,
    )


class Loss(Directive):
    """The loss: cross entropy over tokens."""

    keyword: ClassVar[str] = "loss"
    subject: ClassVar[str | None] = "form"
    absent: ClassVar[Mapping[str, Any] | None] = {}

    form: EagerLoss | FusedLoss | ChunkedLoss = option(
        Calls((EagerLoss, FusedLoss, ChunkedLoss)), doc="How it is computed.", default=EagerLoss()
    )
