"""Linear layers in float8: conversion by torchao, and all-gathers in float8."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.shared_modules import replace_everywhere
from legoai.runtime.torch_internals.operators import is_traceable_wrapper_subclass
from legoai.runtime.wrapped import local_part
from legoai.specs.loggers import OF_TORCHAO, quiet

_IN_FP32: Final = ContextVar("float8_products_in_fp32", default=False)


@contextlib.contextmanager
def float8_products(*, in_fp32: bool) -> Iterator[None]:
    """Let layers that are converted meanwhile multiply their float8 numbers in fp32, or with the float8 kernel.

    On a CPU the float8 kernel is torch's reference loop, which takes hundreds of times as long.
    """
    token = _IN_FP32.set(in_fp32)
    try:
        yield
    finally:
        _IN_FP32.reset(token)


def convert_to_float8(
    module: nn.Module,
    paths: Sequence[str],
    *,
    recipe: str,
    gather_weights: bool = False,
    everywhere_in: nn.Module | None = None,
) -> None:
    """Let linear layers within a module compute in float8 with dynamic scaling, by torchao.

    Their parameters are stored and initialised as before.

    Args:
        module: that contains the layers.
        paths: of the layers, relative to ``module``.
        recipe: a name of `torchao.float8.Float8LinearRecipeName`.
        gather_weights: let `fully_shard` cast each rank's shard of a weight, with the scale of `compute_float8_scales`,
            and all-gather it in float8.
        everywhere_in: a model in which these layers have further places.

    Raises:
        RunError: torchao is not installed.
    """
    float8 = _torchao()
    before = {path: module.get_submodule(path) for path in paths}
    float8.convert_to_float8_training(
        module,
        module_filter_fn=lambda _, path: path in before,
        config=replace(
            float8.Float8LinearConfig.from_recipe_name(recipe),
            enable_fsdp_float8_all_gather=gather_weights,
            emulate=_IN_FP32.get(),
        ),
    )
    for path, layer in before.items():
        converted = module.get_submodule(path)
        _draw_as_before(converted, layer)
        if everywhere_in is not None:
            replace_everywhere(everywhere_in, layer, converted)


def compute_float8_scales(models: Iterable[nn.Module]) -> None:
    """Compute the scales of all weights that are all-gathered in float8, by one all-reduce for each mesh.

    Args:
        models: those of this rank, whose weights `fully_shard` has sharded.
    """
    by_mesh: dict[Any, list[nn.Module]] = {}
    for model in models:
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, DTensor) and _wraps(weight._local_tensor):
                by_mesh.setdefault(weight.device_mesh, []).append(module)
    with quiet("torch.distributed.tensor._redistribute"):  # one all-reduce for each axis, of a number for each layer
        for layers in by_mesh.values():
            _torchao().precompute_float8_dynamic_scale_for_fsdp(nn.ModuleList(layers))


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter on the same memory, without the subclass that casts it while it is gathered."""
    local = local_part(tensor)
    if not _wraps(local):
        return tensor
    names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
    values: torch.Tensor = getattr(local, names[0])
    if not isinstance(tensor, DTensor):
        return values
    return DTensor.from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def float8_colwise(**options: Any) -> ParallelStyle:
    """Return torchao's `ColwiseParallel`, which casts before it gathers; see `torch.distributed.tensor.parallel`."""
    return _style("Float8ColwiseParallel", options)


def float8_rowwise(**options: Any) -> ParallelStyle:
    """Return torchao's `RowwiseParallel`, which casts the gradient that it gathers."""
    return _style("Float8RowwiseParallel", options)


def float8_inputs(**options: Any) -> ParallelStyle:
    """Return torchao's `PrepareModuleInput`, which casts an input and gathers it once for all layers that read it."""
    return _style("PrepareFloat8ModuleInput", options)


def _style(name: str, options: dict[str, Any]) -> ParallelStyle:
    _torchao()
    from torchao.float8 import float8_tensor_parallel

    style: ParallelStyle = getattr(float8_tensor_parallel, name)(**options)
    return style


def _torchao() -> Any:
    """Return torchao's part for training in float8."""
    try:
        with quiet(*OF_TORCHAO):
            from torchao import float8
    except ImportError as error:
        raise RunError(
            RunErrorCode.NO_FLOAT8,
            f"the plan computes in float8, which needs torchao, and importing torchao.float8 fails: {error}",
            help="pip install 'legoai[float8]', or take the float8 rules out of the plan",
        ) from error
    return float8


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether a local tensor is one of torchao's, which wraps the values."""
    return type(tensor).__module__.startswith("torchao.") and is_traceable_wrapper_subclass(tensor)


def _draw_as_before(converted: nn.Module, layer: nn.Module) -> None:
    """Give a layer the initialisation method of the other layer, and the attributes that it reads."""
    for name, value in vars(layer).items():
        converted.__dict__.setdefault(name, value)
    initialise = getattr(type(layer), "reset_parameters", None)
    if initialise is not None:
        object.__setattr__(converted, "reset_parameters", MethodType(initialise, converted))
