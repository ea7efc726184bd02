"""`offload`: states that are held in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Calls, Directive, option
from legoai.specs.directives.comm import ByBytes
from legoai.specs.directives.kinds import Choice, Either

_AMOUNT = Either((Choice(("none", "all", "adaptive")), Calls((ByBytes,))))


class Offload(Directive):
    """Offloading: none, all, so many bytes, or as much as the memory limit asks for."""

    keyword: ClassVar[str] = "offload"
    absent: ClassVar[Mapping[str, Any] | None] = {}

    optimizer: Any = option(
        _AMOUNT,
        doc=(
            "Optimizer state, but for the optimizer's step. Under `backend = graph` copies run beside forward and "
            "backward; `bytes(n)`: at most so much of it, `adaptive`: what exceeds the bound of `require peak_memory`, "
            "in both cases of whole parameters."
        ),
        default="none",
    )
    parameters: Any = option(
        _AMOUNT, doc="Sharded parameters and gradients, and with them the optimizer.", default="none"
    )
    activations: Any = option(
        _AMOUNT,
        doc=(
            "What the forward pass saves for the backward pass, but for parameters. Under `backend = graph` copies run "
            "beside computation; `bytes(n)`: at most so much of it, evenly over the blocks; `adaptive`: what exceeds "
            "the bound of `require peak_memory`."
        ),
        default="none",
    )

    @property
    def observes_memory_limit(self) -> bool:
        """Whether `require peak_memory` decides how much leaves the device."""
        return "adaptive" in [amount for amount in (self.optimizer, self.activations) if isinstance(amount, str)]
