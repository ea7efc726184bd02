"""Muon for sharded matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from legoai.runtime.torch_internals.distributed.meshes import StridedShard
from legoai.runtime.torch_internals.optimizers import muon_rate, orthogonalized
from legoai.runtime.wrapped import to_local


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that orthogonalizes full matrices, however they are sharded.

    With DTensors, torch's own implementation multiplies shards of matrices, with a collective in each product and sums
    in another order. Here, as many equal matrices as there are ranks that share them are redistributed so that each
    rank gets one full matrix (an all-to-all in bf16, in which Muon computes anyway), orthogonalizes it as torch does,
    and returns its shards. The result is bitwise that of full matrices with the same gradients, and no matrix is
    orthogonalized by two ranks that share it. Ranks that hold replicas do the same work.

    Momentum is sharded like the parameter.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        assert closure is None, "a closure would compute its gradients again on every rank"
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for batch in _batches(item for item in group["params"] if item.grad is not None):
                updates = [self._momentum(parameter, group) for parameter in batch]
                for parameter, update in zip(batch, _orthogonal(batch, updates, group), strict=True):
                    local = to_local(parameter)
                    local.mul_(1 - rate * decay)
                    local.add_(update, alpha=-muon_rate(rate, group["adjust_lr_fn"], parameter.shape))

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the matrix to orthogonalize of this rank's shard, in bf16."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        own, buffer, momentum = to_local(gradient), to_local(state["momentum_buffer"]), group["momentum"]
        buffer.lerp_(own, 1 - momentum)
        return (own.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()


def _batches(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Divide parameters into lists of equal ones, each as long as there are ranks that share a matrix."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        kind = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        alike.setdefault((kind, parameter.shape), []).append(parameter)
    for members in alike.values():
        count = _sharing(members[0])
        for start in range(0, len(members), count):
            yield members[start : start + count]


def _sharing(parameter: torch.Tensor) -> int:
    """Return the number of ranks that hold different parts of a matrix."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def _orthogonal(
    batch: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], group: dict[str, Any]
) -> Sequence[torch.Tensor]:
    """Orthogonalize matrices of which this rank has a shard, and return its shards."""
    constants = group["ns_coefficients"], group["ns_steps"], group["eps"]
    first = batch[0]
    if not isinstance(first, DTensor) or _sharing(first) == 1:
        return [orthogonalized(update, *constants) for update in updates]
    mesh = first.device_mesh
    divided: list[Placement] = [_of_stack(placement) for placement in first.placements]
    whole: list[Placement] = [Replicate() if placement.is_replicate() else Shard(0) for placement in divided]
    shape = torch.Size((len(batch), *first.shape))
    stride = (first.shape[0] * first.shape[1], first.shape[1], 1)

    def stack(parts: torch.Tensor, placements: list[Placement]) -> DTensor:
        return DTensor.from_local(parts, mesh, placements, run_check=False, shape=shape, stride=stride)

    own = stack(torch.stack(list(updates)), divided).redistribute(placements=whole).to_local()
    done = [orthogonalized(matrix, *constants) for matrix in own.unbind()]
    result = torch.stack(done) if done else own
    return stack(result, whole).redistribute(placements=divided).to_local().unbind()


def _of_stack(placement: Placement) -> Placement:
    """Return the placement of a stack of matrices that are placed so."""
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim + 1)
    assert placement.is_replicate(), f"a parameter is {placement}"
    return placement
