"""Compilation of layers of `torch.nn`, and hooks around compiled modules for the inputs and outputs of their graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.torch_internals.collectives import AsyncCollectiveTensor, wait_tensor
from legoai.runtime.torch_internals.operators import tree_map_only
from legoai.runtime.torch_internals.settings import (
    enable_async_tp,
    enable_symmetric_memory,
    tagged_compile_cache,
)


def own_compile_cache(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Return a context in which ranks of different groups share no compiled code.

    The names of groups are constants of compiled collectives, but not part of the keys of the compiler's caches
    (PyTorch 2.13): a rank could be given a graph that uses the group of another.
    """
    return tagged_compile_cache(" ".join(str(group.group_name) for group in mesh.get_all_groups()))


def compile_layer(layer: nn.Module, **options: Any) -> None:
    """Compile a layer that may be one of `torch.nn`, as `layer.compile` compiles a module of other authors.

    The compiler skips functions of `torch.nn` unless another function calls them (PyTorch 2.13): `layer.compile` would
    have no effect, or fail under `fullgraph`.

    Args:
        layer: whose forward becomes a function that calls its own.
        options: of `torch.compile`.
    """
    forward = layer.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    layer.forward = called
    layer.compile(**options)


def wait_for_output(module: nn.Module) -> None:
    """Make a module wait for the collectives in its output before it returns.

    The output of a tensor-parallel module is a pending collective, an `AsyncCollectiveTensor`. A compiled module with
    such an input loses its gradient (PyTorch 2.13).
    """
    module.register_forward_hook(lambda _module, _args, output: _waited(output))


def wait_for_inputs(module: nn.Module) -> None:
    """Make a module wait for the collectives in its inputs, for compiled modules within it."""
    module.register_forward_pre_hook(
        lambda _module, args, kwargs: (_waited(args), _waited(kwargs)),
        with_kwargs=True,
    )


def _waited(tree: Any) -> Any:
    """Wait by the differentiable operator; `AsyncCollectiveTensor.wait` has no gradient."""
    return tree_map_only(AsyncCollectiveTensor, wait_tensor, tree)


def overlap_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let inductor split tensor-parallel products into chunks that overlap their collectives (AsyncTP).

    Args:
        mesh: of tensor parallelism, whose ranks share symmetric memory.

    Raises:
        RunError: the device has no symmetric memory.
    """
    if mesh.device_type == "cpu":
        raise RunError(
            RunErrorCode.DEVICE,
            "async_tp needs symmetric memory, which processes on a cpu do not share",
            help="leave `async_tp` out of the plan",
        )
    enable_async_tp()
    enable_symmetric_memory(mesh.get_group().group_name)
