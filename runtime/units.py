"""What are the units of `fully_shard` and `replicate` told in the course of a step?"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule


def units_of(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return every unit in the modules; those of `replicate` are of the same kind."""
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def reshard_units(units: Iterable[FSDPModule]) -> None:
    """Free all gathered parameters, so that the next forward gathers them as they are then.

    Units that stay gathered after forward, after backward or from one micro batch to the next would otherwise
    compute with values from before the optimizer's update.
    """
    for unit in units:
        unit.reshard()


def set_gradient_reduction(model: nn.Module, *, reduce: bool) -> None:
    """Say whether the next backward reduces gradients over the data-parallel ranks, or leaves that to a later one.

    Gradients that are not reduced are added up on each rank, whole, in the dtype in which they will be reduced.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
        model.set_is_last_backward(reduce)
