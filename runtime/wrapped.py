"""Plain tensors within wrapper subclasses: shards, results of pending collectives, float8 with its scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from legoai.runtime.torch_internals.operators import is_traceable_wrapper_subclass


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor consists of, without waiting for pending collectives."""
    if isinstance(tensor, DTensor):
        yield from plain_parts(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor
