"""Units of `fully_shard` and `replicate` in the course of a step."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard_units(model: nn.Module) -> None:
    """Free all unsharded parameters, so that the next forward gathers their new values.

    Units that stay unsharded after backward, or after a forward that no backward follows, would otherwise compute with
    values from before the optimizer's update.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
