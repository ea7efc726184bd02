"""Styles of tensor parallelism whose backward overlaps communication with products, as Megatron-LM's layers do.

A column-wise layer under sequence parallelism needs all positions of its input, of which each rank has some. It gathers
them in forward, saves only its own, and gathers them again in backward. Meanwhile the gradient of the input is
computed; while that is reduce-scattered, the gradients of the weights are computed (Korthikanti et al. 2022, section
4.2.2). Layers that read the same input are computed together, so that it is gathered once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

from legoai.runtime.torch_internals.distributed.collectives import all_gather_single, reduce_scatter_single, wait_tensor
from legoai.runtime.wrapped import to_local

_SEQUENCE = 1
"""The dim that is cut: of [batch, sequence, …, features]."""


class OverlappedInput(PrepareModuleInput):
    """Gathers a sequence-sharded input for column-wise layers that alone read it, with overlapped backward.

    The module's own forward gets the sharded input, a DTensor, and passes it to the layers. Their outputs have been
    computed before, for all of them at once.

    Args:
        linears: paths of the layers within the module; each also has the style `ColwiseParallel`, and is called once.
        input_layouts: of the module's arguments by position: the layout of the input, None for all others.
        input_kwarg_layouts: the same for an input that is given by keyword.
    """

    def __init__(
        self,
        *linears: str,
        input_layouts: tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=input_kwarg_layouts,
        )
        self.linears = linears

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        layers = {path: _linear(module.get_submodule(path)) for path in self.linears}
        computed: dict[str, torch.Tensor] = {}
        for path, layer in layers.items():
            layer.forward = partial(_take, computed, path)  # type: ignore[method-assign]

        def compute(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = self._input(arguments, keywords)
            computed.update(zip(layers, _outputs(given, list(layers.values()), device_mesh), strict=True))

        module.register_forward_pre_hook(compute, with_kwargs=True)
        return module

    def _input(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> DTensor:
        """The one argument that has a layout."""
        for argument, layout in zip(arguments, self.input_layouts or (), strict=False):
            if layout is not None:
                return argument  # type: ignore[no-any-return]
        return keywords[next(iter(self.input_kwarg_layouts))]  # type: ignore[no-any-return]


class OverlappedColwise(ColwiseParallel):
    """`ColwiseParallel` for a layer with a sequence-sharded input, with overlapped communication in backward."""

    def __init__(
        self,
        *,
        input_layouts: Placement,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]  # the layer itself gathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _linear(super()._apply(module, device_mesh))

        def forward(given: Any) -> torch.Tensor:
            return _outputs(given, [layer], device_mesh)[0]

        layer.forward = forward  # type: ignore[method-assign, assignment]
        return layer


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear), f"a linear layer, not {type(module).__name__}"
    return module


def _take(computed: dict[str, torch.Tensor], path: str, _: torch.Tensor) -> torch.Tensor:
    """A layer's output: its product, which was computed together with those of the others."""
    return computed.pop(path)


def _outputs(given: DTensor, layers: Sequence[nn.Linear], mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return the outputs of column-wise layers for a sequence-sharded input: DTensors sharded along the features."""
    pieces = given.redistribute(placements=(Shard(_SEQUENCE),)).to_local()
    weights = [to_local(layer.weight) for layer in layers]
    biases = [None if layer.bias is None else to_local(layer.bias) for layer in layers]
    kind = pieces.device.type
    if torch.is_autocast_enabled(kind) and pieces.dtype != torch.float64:
        # The dtypes to which autocast would cast for each product; the backward, which runs without autocast, gets them
        # so.
        dtype = torch.get_autocast_dtype(kind)
        pieces, weights = pieces.to(dtype), [weight.to(dtype) for weight in weights]
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
    outputs = _Linears.apply(pieces, mesh.get_group(), len(layers), *weights, *biases)  # type: ignore[no-untyped-call]
    return [
        _cut_by_features(output, layer.weight.shape[0], mesh) for output, layer in zip(outputs, layers, strict=True)
    ]


def _cut_by_features(output: torch.Tensor, features: int, mesh: DeviceMesh) -> DTensor:
    """This rank's features of a layer's output as a shard of all features; shards may have different sizes."""
    shape = torch.Size((*output.shape[:-1], features))
    stride = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
    return DTensor.from_local(output, mesh, (Shard(-1),), run_check=False, shape=shape, stride=stride)


class _Linears(torch.autograd.Function):
    """Products of one sequence-sharded input with shards of several weights.

    A gathered tensor is in rank order, each rank with its shard of every sequence. With more than one sequence a copy
    restores sequence order: of the input, or of results in rank order.
    """

    @staticmethod
    def forward(
        ctx: Any, pieces: torch.Tensor, group: dist.ProcessGroup, count: int, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights = [weight for weight in parameters[:count] if weight is not None]
        pairs = list(zip(weights, parameters[count:], strict=True))
        ctx.group = group
        ctx.save_for_backward(pieces, *weights)
        ctx.set_materialize_grads(False)
        whole = _wait(_gather(pieces, group))
        if _width(weights) < pieces.shape[-1]:
            return tuple(_in_order(F.linear(whole, weight, bias), group) for weight, bias in pairs)
        whole = _in_order(whole, group)
        return tuple(F.linear(whole, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pieces, *weights = ctx.saved_tensors
        group, count = ctx.group, len(weights)
        for_input, _, _, *for_parameters = ctx.needs_input_grad
        gathering = _gather(pieces, group) if any(for_parameters[:count]) else None
        by_rank = _width(weights) < 2 * pieces.shape[-1]  # rather than the input and its gradient
        given_back = [_by_rank(each, group) if each is not None and by_rank else each for each in gradients]
        rows = [None if each is None else each.flatten(0, -2) for each in given_back]
        summed = _of_input(rows, weights) if for_input else None
        whole = None
        if gathering is not None:
            whole = _wait(gathering)
            whole = (whole if by_rank else _in_order(whole, group)).flatten(0, -2)
        del gathering
        scattered = None
        if summed is not None:
            shape = (group.size() * len(pieces), *pieces.shape[1:])
            summed = summed.view(shape) if by_rank else _by_rank(summed.view(len(pieces), -1, *shape[2:]), group)
            scattered = reduce_scatter_single(summed, "sum", 0, group)  # reads it until it is waited for
        found: list[torch.Tensor | None] = [None] * (2 * count)
        for index, row in enumerate(rows):
            if row is not None and whole is not None and for_parameters[index]:
                found[index] = row.t().mm(whole)
            if row is not None and for_parameters[count + index]:
                found[count + index] = row.sum(0)
        return (None if scattered is None else _wait(scattered), None, None, *found)


def _width(weights: Sequence[torch.Tensor]) -> int:
    """Number of features that a rank computes for each position: the smaller tensor is the one that is copied."""
    return sum(len(weight) for weight in weights)


def _of_input(rows: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The gradient of the layers' input, added up in the products themselves; None where no gradient arrived."""
    summed: torch.Tensor | None = None
    for row, weight in zip(rows, weights, strict=True):
        if row is not None:
            summed = row.mm(weight) if summed is None else summed.addmm_(row, weight)
    return summed


def _gather(pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Begin to gather all ranks' pieces, one after the other along the first dim."""
    gathered: torch.Tensor = all_gather_single(pieces.contiguous(), 0, group)
    return gathered


def _in_order(gathered: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sequences whose shards were gathered; a copy where there are several."""
    return gathered.view(group.size(), -1, *gathered.shape[1:]).transpose(0, 1).flatten(1, 2)


def _by_rank(sequences: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of :func:`_in_order`."""
    count, _, *features = sequences.shape
    return sequences.view(count, group.size(), -1, *features).transpose(0, 1).flatten(0, 1).contiguous()


def _wait(result: torch.Tensor) -> torch.Tensor:
    """The result of a collective, which all later computation waits for."""
    waited: torch.Tensor = wait_tensor(result)  # type: ignore[no-untyped-call]
    return waited
