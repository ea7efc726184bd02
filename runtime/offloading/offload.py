"""Offloading of activations and optimizer state to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim.optimizer import Optimizer

from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.operators import is_traceable_wrapper_subclass
from legoai.runtime.wrapped import local_part, plain_parts

HOST = torch.device("cpu")


def offload_activations(model: nn.Module) -> None:
    """Move tensors that the model's forward saves for backward to host memory, and back when backward needs them.

    Parameters and their views are saved as they are: `fully_shard` frees and gathers them itself. The copies run on the
    compute stream. On a CPU nothing is moved.

    Args:
        model: changed in place; called as a whole, or as a stage of a pipeline.
    """
    saved = _SavedOnHost()
    outside: Callable[[Any], Any] = torch.compiler.disable  # called only here: it imports the compiler
    model.register_forward_pre_hook(outside(saved.enter))
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    within = {part for module in compiled for part in module.modules()}
    for module in model.modules():
        if module not in within and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(saved.spare)
    for module in compiled:
        module.register_forward_pre_hook(outside(saved.spare_all))
    model.register_forward_hook(outside(saved.leave), always_call=True)


class _SavedOnHost:
    """The hooks of one model; all but :meth:`spare` are to stay outside of compiled graphs."""

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
        """Remember the storages of the parameters with which the module is about to compute."""
        self._spare(module.parameters(recurse=False))

    def spare_all(self, module: nn.Module, arguments: Any) -> None:
        """The same of a compiled module, within which no hooks run."""
        self._spare(module.parameters())

    def _spare(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            self._spared.update(part.untyped_storage()._cdata for part in plain_parts(parameter))

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Copy the local tensors of a tensor to the host; return the tensor itself where nothing needs to be copied."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if isinstance(tensor, DTensor):
            local = self._pack(tensor._local_tensor)
            if local is tensor._local_tensor:
                return tensor
            return _Sharded(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        if not is_traceable_wrapper_subclass(tensor):
            if tensor.device == HOST or tensor.untyped_storage()._cdata in self._spared:
                return tensor
            return _Moved(_to_host(tensor), tensor.device)
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        packed = {name: self._pack(part) for name, part in parts.items()}
        if all(packed[name] is part for name, part in parts.items()):
            return tensor
        return _Wrapped(type(tensor), packed, context, tensor.shape, tensor.stride())


class _Moved(NamedTuple):
    """A copy on the host, and the device to which it comes back."""

    host: torch.Tensor
    device: torch.device


class _Sharded(NamedTuple):
    """Information to rebuild a DTensor from its local part."""

    local: Any
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class _Wrapped(NamedTuple):
    """Information to rebuild a tensor subclass from its parts: its class, the parts, and its context."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _Moved):
        return saved.host.to(saved.device, non_blocking=True)
    if isinstance(saved, _Sharded):
        local, mesh, placements, shape, stride = saved
        return DTensor.from_local(_unpack(local), mesh, placements, run_check=False, shape=shape, stride=stride)
    if isinstance(saved, _Wrapped):
        parts = {name: _unpack(part) for name, part in saved.parts.items()}
        made: torch.Tensor = saved.kind.__tensor_unflatten__(parts, saved.context, saved.shape, saved.stride)
        return made
    assert isinstance(saved, torch.Tensor)
    return saved


def offload_optimizer_state(optimizer: Optimizer) -> Optimizer:
    """Keep the optimizer's state in host memory except during its step, and return the optimizer.

    All of the state comes to the device at once, so a step needs as much memory as without offloading; memory is saved
    in forward and backward. Scalars, such as Adam's count of steps, stay on the device. On a CPU nothing is moved.
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
    """Replace a value of a parameter's state by its copy elsewhere."""
    value = state[name]
    if isinstance(value, DTensor):
        value._local_tensor = moved  # as `fully_shard` does: the part is in host memory, the mesh of the device
    else:
        state[name] = moved


def _to_host(tensor: torch.Tensor, *, wait: bool = False) -> torch.Tensor:
    """Copy to page-locked memory; without waiting, the copy can be read by the device's stream only."""
    host = torch.empty_like(tensor, device=HOST, pin_memory=torch.cuda.is_available())
    return host.copy_(tensor, non_blocking=not wait)
