"""Offloading of activations and optimizer state to host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

HOST = torch.device("cpu")


def offload_activations(model: nn.Module) -> None:
    """Move what the model's forward saves for backward to host memory, and back when backward asks for it.

    Parameters are saved as they are, however their modules transpose or cut them: `fully_shard` frees and gathers them
    itself. The copies are made by the stream that computes. On a CPU nothing moves.

    Args:
        model: changed in place; called as a whole, or as a stage of a pipeline.
    """
    saved = _SavedOnHost()
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(saved.spare)
    model.register_forward_pre_hook(saved.enter)
    model.register_forward_hook(saved.leave, always_call=True)


class _SavedOnHost:
    """The hooks of one model."""

    def __init__(self) -> None:
        self._spared: set[int] = set()
        self._entered: list[saved_tensors_hooks] = []

    def enter(self, module: nn.Module, arguments: Any) -> None:
        self._spared.clear()
        context = saved_tensors_hooks(self._pack, _unpack)
        context.__enter__()
        self._entered.append(context)

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def spare(self, module: nn.Module, arguments: Any) -> None:
        """Remember the storage of the parameters with which the module is about to compute."""
        self._spared.update(_storage(parameter) for parameter in module.parameters(recurse=False))

    def _pack(self, tensor: torch.Tensor) -> Any:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device == HOST or _storage(tensor) in self._spared:
            return tensor
        return _to_host(local), local.device, _layout(tensor)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What makes a DTensor of its local part; None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    host, device, layout = saved
    local: torch.Tensor = host.to(device, non_blocking=True)
    if layout is None:
        return local
    mesh, placements, shape, stride = layout
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def offload_optimizer_state(optimizer: Optimizer) -> Optimizer:
    """Keep the optimizer's state in host memory but for the time of its step, and return the optimizer.

    The state comes to the device all at once, so a step needs as much memory as without offloading: what is spared
    is the memory of forward and backward. Single numbers, such as Adam's count of steps, stay where they are. On a
    CPU nothing moves.
    """
    optimizer.register_step_pre_hook(_fetch_state)
    optimizer.register_step_post_hook(_store_state)
    return optimizer


def _fetch_state(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    for parameter, state in optimizer.state.items():
        _move_state(state, local_part(parameter).device)


def _store_state(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    for state in optimizer.state.values():
        _move_state(state, HOST)


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            continue
        local = local_part(value)
        if local.device == device:
            continue
        moved = _to_host(local, wait=True) if device == HOST else local.to(device, non_blocking=True)
        replace_part(state, name, moved)


def replace_part(state: dict[str, Any], name: str, moved: torch.Tensor) -> None:
    """Let a value of a parameter's state be what was copied of it, elsewhere."""
    value = state[name]
    if isinstance(value, DTensor):
        value._local_tensor = moved  # as `fully_shard` does: the part is in host memory, the mesh of the device
    else:
        state[name] = moved


def _to_host(tensor: torch.Tensor, *, wait: bool = False) -> torch.Tensor:
    """Copy to page-locked memory; without waiting, the copy can be read by the device's stream only."""
    host = torch.empty_like(tensor, device=HOST, pin_memory=torch.cuda.is_available())
    return host.copy_(tensor, non_blocking=not wait)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> int:
    identity: int = local_part(tensor).untyped_storage()._cdata
    return identity
