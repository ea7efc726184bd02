"""Optimizer whose state is sharded over the replicas (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from legoai.runtime.torch_internals.distributed.collectives import gather_into
from legoai.runtime.torch_internals.distributed.meshes import StridedShard


class ShardedOptimizer(torch.optim.Optimizer):
    """Shards the optimizer's state over the replicas (ZeRO stage 1: Rajbhandari et al. 2020, section 5.1).

    Every replica updates its slice of each parameter, in place, and the slices are all-gathered. A slice is a DTensor
    that is sharded on dim 0 over the axis on which the parameter is replicated, as with `fully_shard`, and so is its
    state: a checkpoint has the names and shapes of the plain model's, and can be loaded on any mesh.

    Operations that need full gradients (norm, clipping) see them: `param_groups` hold the model's own parameters.

    Args:
        parameters: groups of DTensors that are replicated on `axis`.
        optimizer_class: of `torch.optim`, or similar: it is elementwise, or supports DTensors.
        axis: the mesh axis of the replicas.
        defaults: the constants of `optimizer_class`.

    Raises:
        ValueError: a parameter is not replicated on the axis.
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        axis: str,
        **defaults: Any,
    ) -> None:
        self.axis = axis
        sliced = [
            {**group, "params": [nn.Parameter(_slice(parameter, axis)) for parameter in group["params"]]}
            for group in parameters
        ]
        self.sliced = optimizer_class(sliced, **defaults)
        super().__init__([dict(group) for group in parameters], self.sliced.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's slices, then gather those of the others."""
        assert closure is None, "a closure would compute its gradients again on every rank"
        for group, sliced in zip(self.param_groups, self.sliced.param_groups, strict=True):
            sliced.update({name: value for name, value in group.items() if name != "params"})
        for parameter, own in self._pairs():
            assert _storage(own) == _storage(parameter), "the parameter was moved after the optimizer was made"
            own.grad = None if parameter.grad is None else _slice(parameter.grad, self.axis)
        self.sliced.step()
        for parameter, own in self._pairs():
            own.grad = None
            if own in self.sliced.state:
                self.state[parameter] = self.sliced.state[own]
        self._gather()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of an optimizer over the same parameters and slices."""
        super().load_state_dict(state_dict)
        self.give_state()

    def give_state(self) -> None:
        """Share the replaced state of parameters with the slices."""
        for parameter, own in self._pairs():
            if parameter in self.state:
                self.sliced.state[own] = self.state[parameter]

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Every parameter with its slice."""
        for group, sliced in zip(self.param_groups, self.sliced.param_groups, strict=True):
            yield from zip(group["params"], sliced["params"], strict=True)

    def _gather(self) -> None:
        """Start all all-gathers at once and wait for them; a dim 0 that does not divide needs a padded copy."""
        pending = []
        for parameter, _ in self._pairs():
            assert isinstance(parameter, DTensor)
            mesh, local = parameter.device_mesh, parameter.to_local()
            if local.ndim == 0 or local.numel() == 0:
                continue
            ranks, rank = mesh.size(_dim(mesh, self.axis)), mesh.get_local_rank(self.axis)
            rows = -(-local.shape[0] // ranks)
            whole = local if local.shape[0] == rows * ranks else local.new_empty(rows * ranks, *local.shape[1:])
            own = whole[rank * rows : (rank + 1) * rows]
            if whole is not local:
                mine = local[rank * rows : (rank + 1) * rows]
                own[: mine.shape[0]] = mine
            work = gather_into(whole, own, group=mesh.get_group(self.axis), async_op=True)
            pending.append((work, whole, local))
        for work, whole, local in pending:
            assert work is not None
            work.wait()
            if whole is not local:
                local.copy_(whole[: local.shape[0]])


def _slice(tensor: torch.Tensor, axis: str) -> DTensor:
    """Return this rank's rows of a tensor that is replicated on the axis.

    The result is a DTensor of the same shape, on the same storage. A tensor without dims is returned as it is: every
    rank keeps its state.

    Raises:
        ValueError: the tensor is not replicated on the axis.
    """
    if not isinstance(tensor, DTensor) or axis not in (tensor.device_mesh.mesh_dim_names or ()):
        raise ValueError(f"a parameter of shape {tuple(tensor.shape)} does not lie on the mesh axis {axis!r}")
    mesh = tensor.device_mesh
    dim = _dim(mesh, axis)
    if not isinstance(tensor.placements[dim], Replicate):
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} is {tensor.placements[dim]} on {axis!r}, not replicated"
        )
    own, placements = tensor.to_local().detach(), tensor.placements
    if tensor.ndim > 0:
        rows = -(-own.shape[0] // mesh.size(dim))
        first = min(mesh.get_local_rank(axis) * rows, own.shape[0])
        own, placements = own[first : first + rows], _sharded(placements, mesh, dim)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _sharded(placements: tuple[Placement, ...], mesh: DeviceMesh, dim: int) -> tuple[Placement, ...]:
    """The placements with dim 0 cut on one more axis of the mesh, within the parts that inner axes have cut already."""
    parts = 1
    for inner in range(dim + 1, mesh.ndim):
        placement = placements[inner]
        if isinstance(placement, Shard) and placement.dim == 0:
            parts *= mesh.size(inner)
    cut = StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
    return (*placements[:dim], cut, *placements[dim + 1 :])


def _dim(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names
    assert names is not None
    return names.index(axis)


def _storage(tensor: torch.Tensor) -> int:
    assert isinstance(tensor, DTensor)
    number: int = tensor._local_tensor.untyped_storage()._cdata
    return number
