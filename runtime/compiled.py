"""Compilation of modules with their hooks, and hooks around compiled modules for the inputs and outputs of graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor, wait_tensor
from legoai.runtime.torch_internals.hooks import take_forward_hooks
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


def compile_with_hooks(module: nn.Module, **options: Any) -> None:
    """Compile a module's forward and the hooks that it has by now as one function.

    `module.compile` leaves hooks out: what is compiled is `Module.__call__` or a layer's forward, functions of
    `torch.nn`, which the compiler skips unless another function calls them (PyTorch 2.13). The hooks of tensor
    parallelism would become graphs of their own: no pass would see a collective beside its product, and the tangents
    between the graphs are whole tensors, for which backward reduces where it could scatter. A layer of `torch.nn` would
    not be compiled, or fail under `fullgraph`.

    Args:
        module: whose forward becomes a function that calls its own, between its hooks. Hooks that are registered later,
            as those of FSDP units, stay outside.
        options: of `torch.compile`.
    """
    forward = module.forward
    before, after = take_forward_hooks(module)

    def called(*args: Any, **kwargs: Any) -> Any:
        for hook, with_kwargs in before:
            given = hook(module, args, kwargs) if with_kwargs else hook(module, args)
            if given is not None and with_kwargs:
                args, kwargs = given
            elif given is not None:
                args = given if isinstance(given, tuple) else (given,)
        output = forward(*args, **kwargs)
        for hook, with_kwargs in after:
            left = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
            if left is not None:
                output = left
        return output

    module.forward = called
    module.compile(**options)


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
