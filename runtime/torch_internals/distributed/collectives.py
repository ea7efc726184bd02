"""Private names of `torch.distributed` that a real run needs, and those that torch has renamed.

Functional collectives are what DTensor itself calls; torch documents them, but keeps them in a private module.
"""

from collections.abc import Callable
from typing import Any, Final

from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single, wait_tensor

# A group by the name that the schema of a functional collective carries.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group as resolve_process_group,
)

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_single",
    "all_to_all_single",
    "gather_into",
    "reduce_scatter_single",
    "resolve_process_group",
    "scatter_into",
    "wait_tensor",
]

# Torch 2.13 renamed these, and warns of the names that 2.12 has.
all_gather_single: Final[Callable[..., Any]] = vars(functional).get("all_gather_single", functional.all_gather_tensor)
reduce_scatter_single: Final[Callable[..., Any]] = vars(functional).get(
    "reduce_scatter_single", functional.reduce_scatter_tensor
)
gather_into: Final[Callable[..., Any]] = vars(distributed).get("all_gather_single", distributed.all_gather_into_tensor)
scatter_into: Final[Callable[..., Any]] = vars(distributed).get(
    "reduce_scatter_single", distributed.reduce_scatter_tensor
)
"""The same on tensors that the caller has allocated, not functional."""
