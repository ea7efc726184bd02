"""Initialization of weights: equal on any mesh, without communication."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.specs.models.first_values import FirstValues
from legoai.specs.models.random_operators import seed_generators
from legoai.specs.models.wrappers import WRAPPERS


def plain_path(path: str) -> str:
    """Return a module or parameter path without the segments of wrappers.

    >>> plain_path("layers.0._checkpoint_wrapped_module.attention.wq")
    'layers.0.attention.wq'
    """
    return ".".join(segment for segment in path.split(".") if segment not in WRAPPERS)


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed that is a function of the run's seed and a name, the same on every rank."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give floating-point parameters on the meta device the dtype in which they will be stored.

    Buffers keep the dtype that the model chose for them; in fp64, which only verification uses, they follow, as by
    `model.double()`: most operators take no tensors of two dtypes.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def materialize(
    model: nn.Module,
    *,
    device: Device,
    seed: int,
    first_values: FirstValues | None = None,
    parameters_on_host: bool = False,
) -> None:
    """Allocate a parallelized model that is on the meta device, and initialise it.

    Each parameter is drawn as a full tensor on every rank, from a generator whose seed depends only on the run's seed
    and on the parameter, and the local shard is sliced out. No collective is needed, and the weights are bitwise equal
    on every mesh of one device type. The peak above the shards is the parameters of one module.

    A parameter gets the value that the model's constructor gave it. One that the constructor left empty is drawn by its
    module's `reset_parameters()`. Buffers are computed by their module's `init_buffers()`, or else get the
    constructor's value. A model whose class has a method `initialise_module(path, parameters, buffers)` does all of
    this for all its modules; what it leaves out gets the constructor's value.

    Args:
        model: on the meta device; its parameters are plain or DTensors.
        device: where the parameters will be.
        seed: the run's seed.
        first_values: from the model's constructor; without, parameters are drawn by `reset_parameters()`.
        parameters_on_host: keep the parameters in host memory, and only the buffers on the device.

    Raises:
        RunError: a module has parameters or buffers that neither the constructor nor one of its methods fills.
    """
    _allocate(model, device.torch_device, torch.device("cpu") if parameters_on_host else device.torch_device)
    if not device.holds_values:
        return
    kept_state = device.random_state()
    initialised: set[nn.Parameter] = set()
    by_model = _initialiser_of(model)
    constructed = _Constructed(first_values, seed, device.torch_device)
    try:
        with torch.no_grad():
            for path, module in model.named_modules():
                _initialise_parameters(
                    module,
                    plain_path(path),
                    seed,
                    device,
                    initialised=initialised,
                    by_model=by_model,
                    constructed=constructed,
                )
                _initialise_buffers(module, plain_path(path), by_model, constructed)
    finally:
        device.set_random_state(kept_state)


def _allocate(model: nn.Module, device: torch.device, home: torch.device) -> None:
    """Move buffers to the device and parameters to their home, keeping those tied that `to_empty` would untie."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    model.to_empty(device=home)
    if home != device:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
    for (first, first_name), *others in owners.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


class _Constructed:
    """Values that the model's constructor gave, for one run."""

    def __init__(self, first_values: FirstValues | None, seed: int, device: torch.device) -> None:
        self._first_values = first_values
        self._seed = seed
        self._device = device

    def values(self, path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of those of a module's parameters or buffers that the constructor filled, whole."""
        found = {}
        for name, tensor in tensors.items():
            whole = f"{path}.{name}" if path else name
            if self._first_values is None or not self._first_values.holds(whole, tensor.shape):
                continue
            value = self._first_values.value(whole, device=self._device, seed_of=self._seed_of)
            if not _has_nan(value):
                found[name] = value
        return found

    def _seed_of(self, draw: int) -> int:
        return seed_of(self._seed, f"operator {draw} of the model's construction")


InitialiseModule = Callable[[str, dict[str, torch.Tensor], dict[str, torch.Tensor]], None]
"""Of a module's path, its own parameters and its own buffers."""


def _initialiser_of(model: nn.Module) -> InitialiseModule | None:
    """The method of the model itself that initialises its modules, whatever wraps the model."""
    for path, module in model.named_modules():
        if plain_path(path) == "" and hasattr(type(module), "initialise_module"):
            method: InitialiseModule = module.initialise_module
            return method
    return None


def _initialise_parameters(
    module: nn.Module,
    path: str,
    seed: int,
    device: Device,
    *,
    initialised: set[nn.Parameter],
    by_model: InitialiseModule | None,
    constructed: _Constructed,
) -> None:
    own = {name: p for name, p in module.named_parameters(recurse=False) if p not in initialised}
    if not own:
        return
    given = {} if by_model is not None else constructed.values(path, own)
    for name, value in given.items():
        _copy_shard(value.to(own[name].dtype), own[name])
        initialised.add(own.pop(name))
    if not own:
        return
    whole = {
        name: nn.Parameter(
            torch.empty(p.shape, dtype=p.dtype, device=device.torch_device), requires_grad=p.requires_grad
        )
        for name, p in module._parameters.items()
        if p is not None
    }
    seed_generators(seed_of(seed, path), device.torch_device)
    if by_model is not None:
        for value in whole.values():
            value.detach().fill_(math.nan)
        by_model(path, dict(whole), {})
        left = {name: whole[name] for name in own if _has_nan(whole[name])}
        for name, value in constructed.values(path, left).items():
            whole[name].detach().copy_(value)
        _check_filled(path, whole, own)
    else:
        _reset(module, path, whole)
    for name, parameter in own.items():
        _copy_shard(whole[name].detach(), parameter)
    initialised.update(own.values())


def _check_filled(path: str, whole: Mapping[str, torch.Tensor], own: Iterable[str]) -> None:
    """Check that a model has initialised the parameters of one of its modules completely."""
    left = [name for name in own if _has_nan(whole[name])]
    if left:
        raise RunError(
            RunErrorCode.NO_INITIALISER,
            f"the model does not draw {', '.join(f'{path}.{name}' if path else name for name in left)}",
            help="its constructor, its method initialise_module, or for a model of transformers _init_weights, must "
            "fill it",
        )


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.detach().isnan().any())


def _reset(module: nn.Module, path: str, whole: dict[str, nn.Parameter]) -> None:
    """Initialise full parameters of a module instead of its shards."""
    initialise = _method(module, "reset_parameters")
    if initialise is None:
        raise RunError(
            RunErrorCode.NO_INITIALISER,
            f"module {path or 'root'} ({type(module).__name__}) has parameters, but no method that initialises them",
            help=f"fill them in the constructor of {type(module).__name__}, or give it a method reset_parameters(self) "
            "that fills its own parameters in place",
        )
    shards = dict(module._parameters)
    module._parameters.update(whole)
    try:
        initialise()
    finally:
        module._parameters.update(shards)


def _copy_shard(whole: torch.Tensor, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(cut.to_local())


def _initialise_buffers(
    module: nn.Module, path: str, by_model: InitialiseModule | None, constructed: _Constructed
) -> None:
    own = dict(module.named_buffers(recurse=False))
    if not own:
        return
    initialise = _method(module, "init_buffers")
    if initialise is not None:
        initialise()
        return
    if by_model is not None:
        for buffer in own.values():
            if buffer.is_floating_point():
                buffer.fill_(math.nan)
        by_model(path, {}, own)
        left = {name: buffer for name, buffer in own.items() if _has_nan(buffer)}
        for name, value in constructed.values(path, left).items():
            left.pop(name).copy_(value)
        if not left:
            return
    else:
        values = constructed.values(path, own)
        for name, value in values.items():
            own[name].copy_(value)
        if len(values) == len(own):
            return
    raise RunError(
        RunErrorCode.NO_INITIALISER,
        f"module {path or 'root'} ({type(module).__name__}) has buffers, but no method that computes them",
        help=f"fill them in the constructor of {type(module).__name__}, or give it a method init_buffers(self) that "
        "fills its own buffers in place",
    )


def _method(module: nn.Module, name: str) -> Callable[[], None] | None:
    """Return a method that the module's class defines; a method that a wrapper forwards does not count."""
    method: Callable[[], None] | None = getattr(module, name) if hasattr(type(module), name) else None
    return method
