"""Norm and clipping of gradients, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from legoai.runtime.torch_internals.operators import foreach_mul_, foreach_norm
from legoai.runtime.wrapped import to_local


def reduce_partial_gradients(groups: Iterable[dict[str, Any]]) -> None:
    """Bring every DTensor gradient to its parameter's placements.

    Tensor parallel leaves the gradients of replicated parameters partial (each rank has its tokens' part).
    Reducing them once here spares the norm, the clipping and the optimizer from each doing it again.
    """
    for group in groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)


def squared_norm_share(groups: Iterable[dict[str, Any]], *, holders: int) -> torch.Tensor:
    """Return this rank's share of the squared 2-norm of the whole gradient, as a float64 scalar.

    The shares of all ranks add up to the square, so one all-reduce serves all meshes of a model, and all ranks get
    bitwise equal results. A rank counts the squares of its local elements, divided by the number of ranks that hold the
    same elements.

    Args:
        groups: whose gradients are plain tensors equal on every rank, or DTensors that are not partial.
        holders: ranks among which each parameter is sharded or replicated.
    """
    local: dict[tuple[int, torch.dtype | None], list[torch.Tensor]] = {}
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike = _shards(parameter.grad), _norm_dtype(parameter.grad)
                local.setdefault(alike, []).append(to_local(parameter.grad))
    shares = [
        torch.stack(foreach_norm(grads, dtype=dtype)).double().square().sum() * (shards / holders)
        for (shards, dtype), grads in local.items()
    ]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def clip_gradients(groups: Iterable[dict[str, Any]], *, max_norm: float, total_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / (total_norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    scale = min(1.0, max_norm / (total_norm + 1e-6))
    if scale < 1.0:
        for group in groups:
            grads = [to_local(parameter.grad) for parameter in group["params"] if parameter.grad is not None]
            if grads:
                foreach_mul_(grads, scale)


def _shards(tensor: torch.Tensor) -> int:
    """Return into how many parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def _norm_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a norm; None for the tensor's own.

    Norms of fp16 gradients may be beyond its range, and bf16 would round the norm of each shard by up to 0.4%.
    """
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
