"""Plain tensors within wrapper subclasses: shards, results of pending collectives, float8 with its scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.operators import is_traceable_wrapper_subclass


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, by the differentiable operator of DTensors."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as it is stored, without an operator of autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without waiting for a pending collective."""
    local = local_part(tensor)
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor consists of, without waiting for pending collectives."""
    if isinstance(tensor, DTensor):
        yield from plain_parts(local_part(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor
