"""Styles of tensor parallelism beyond those of PyTorch: for norms over heads, results for all heads, and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from legoai.runtime.torch_internals.hooks import take_forward_hooks


class HeadParallel(SequenceParallel):
    """Runs a norm over the last dim on the heads of this rank: a plain tensor in, a plain tensor out.

    Parameters are replicated. Their gradients are partial sums, since each rank sees other heads; see
    `reduce_partial_gradients`.
    """

    def __init__(self) -> None:
        # The dim of the heads differs between models, but does not matter to a norm over the last dim, which treats all
        # other positions alike.
        super().__init__(sequence_dim=0, use_local_output=True)


class SequenceParallelResults(SequenceParallel):
    """`SequenceParallel` of a module with several results, of which it gives plain tensors: this rank's pieces."""

    def __init__(self, *, sequence_dim: int = 1) -> None:
        super().__init__(sequence_dim=sequence_dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_local_results)
        return module


def _local_results(module: nn.Module, given: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item.to_local() if isinstance(item, DTensor) else item for item in results)


class SharedByHeads(ParallelStyle):
    """Sums the gradient of a module's result over a mesh of one axis, each rank of which uses it for other heads.

    The module has no parameters, and returns a plain tensor that is equal on all ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward: Callable[..., torch.Tensor] = module.forward

        def shared(*args: Any) -> torch.Tensor:
            result = DTensor.from_local(forward(*args), device_mesh, (Replicate(),), run_check=False)
            return result.to_local(grad_placements=(Partial(),))

        module.forward = shared
        return module


class OutputInForward(ParallelStyle):
    """A style whose conversion of the module's result is a part of the module's forward, and no hook behind it.

    Args:
        style: of a module without hooks.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = self.style._apply(module, device_mesh)
        before, after = take_forward_hooks(module)
        for hook, takes_keywords in before:
            module.register_forward_pre_hook(hook, with_kwargs=takes_keywords)
        forward: Callable[..., torch.Tensor] = module.forward

        def laid_out(*given: Any) -> torch.Tensor:
            result = forward(*given)
            for hook, _ in after:
                result = hook(module, given, result)
            return result

        module.forward = laid_out
        return module


class PlacedParameters(ParallelStyle):
    """Places parameters of a linear layer, an embedding or a norm on a mesh of one axis; the others are replicated.

    The module computes on DTensors. For a plain tensor, equal on all ranks, it returns a plain tensor; for a DTensor,
    it returns a DTensor.

    Args:
        placements: by the parameter's name in the module.
    """

    def __init__(self, **placements: Placement) -> None:
        super().__init__()
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            placed = distribute_tensor(parameter, device_mesh, (self.placements.get(name, Replicate()),))
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        forward: Callable[[torch.Tensor], torch.Tensor] = module.forward

        def on_dtensors(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return forward(tensor)
            given = DTensor.from_local(tensor, device_mesh, (Replicate(),), run_check=False)
            return _whole(forward(given))

        module.forward = on_dtensors
        return module


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.redistribute(placements=(Replicate(),)).to_local()
    return whole
