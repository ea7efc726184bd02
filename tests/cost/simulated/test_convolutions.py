"""FLOPs of convolutions, which are the multiply-adds that they need, and the layout of their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from legoai.cost.simulated.device import SIM
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.operators.properties import convolves_channels_last, flops, operator
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Kernel
from support.simulation.simulator import in_the_simulator

BOTH = (True, True)


def case(*, dims: int = 2, groups: int = 1, each: int = 4, transposed: bool = False, **options: int) -> list[Any]:
    """Arguments of `aten.convolution`, of ones, and unpadded, so that each product counts."""
    channels, outputs = groups * each, groups * 6
    shape = (channels, 6, *[3] * dims) if transposed else (outputs, each, *[3] * dims)
    x = torch.ones(2, channels, *range(11, 11 + dims))
    stride, dilation = ([options.get(name, 1)] * dims for name in ("stride", "dilation"))
    return [x, torch.ones(shape), None, stride, [0] * dims, dilation, transposed, [0] * dims, groups]


CASES = [
    case(), case(dims=1), case(dims=3), case(stride=2), case(dilation=2), case(transposed=True),
    case(dims=1, transposed=True, stride=2), case(dims=3, transposed=True, dilation=2, stride=2),
]  # fmt: skip
GROUPED = [
    case(groups=5, each=1), case(groups=5), case(groups=3, dims=1, stride=2), case(groups=2, dims=3, each=2),
    case(groups=3, each=1, dilation=2), case(groups=5, transposed=True, stride=2), case(groups=3, each=1, dims=1),
]  # fmt: skip


def counted(arguments: list[Any], mask: tuple[bool, bool]) -> tuple[int, int, list[torch.Tensor | None]]:
    """FLOPs of a forward and of its backward, and the gradients."""
    func, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    result = func(*arguments)
    x, weight, bias, *rest = arguments
    of_backward = [torch.ones_like(result), x, weight, bias, *rest, [*mask, False]]
    gradients = backward(*of_backward)
    forward_flops = flops(func, operator(func), arguments, {}, result)
    return forward_flops, flops(backward, operator(backward), of_backward, {}, gradients), gradients


@pytest.mark.parametrize("arguments", CASES + GROUPED)
def test_flops_equal_the_products_of_ones(arguments: list[Any]):
    forward, backward, (of_input, of_weight, _) = counted(arguments, BOTH)
    assert of_input is not None and of_weight is not None
    assert forward == 2 * torch.ops.aten.convolution.default(*arguments).sum()
    assert backward == 2 * (of_input.sum() + of_weight.sum()) == 2 * forward


@pytest.mark.parametrize("mask", [(True, False), (False, True)])
def test_a_gradient_that_is_not_asked_for_is_not_counted(mask: tuple[bool, bool]):
    forward, backward, _ = counted(case(groups=5), mask)
    assert backward == forward


@pytest.mark.parametrize("arguments", CASES)
@pytest.mark.parametrize("mask", [BOTH, (True, False), (False, True)])
def test_flops_without_groups_are_those_of_torch(arguments: list[Any], mask: tuple[bool, bool]):
    _, found, gradients = counted(arguments, mask)
    x, weight, bias, *rest = arguments
    result = torch.ops.aten.convolution.default(*arguments)
    of_torch = flop_registry[torch.ops.aten.convolution_backward]
    assert found == of_torch(result, x, weight, bias, *rest, [*mask, False], out_val=gradients)


LAYOUTS = [(images, weight) for images in (False, True) for weight in (False, True)]
SHAPES = [(1, 3, False), (32, 3, False), (1, 1, False), (1, 3, True)]
"""Groups, width of the kernel, and whether it is transposed."""


def layouts(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether a tensor is contiguous, and whether it is with channels last: both, if dims of size 1 leave it open."""
    return tensor.is_contiguous(), tensor.is_contiguous(memory_format=torch.channels_last)


def convolved(device: str) -> list[list[tuple[bool, bool]]]:
    """The layouts of the results and gradients of convolutions whose images or weights have channels last."""
    found = []
    for groups, width, transposed in SHAPES:
        for layout in LAYOUTS:
            shapes = (2, 32, 14, 14), (32, 32 // groups, width, width)
            images, weight = (
                torch.zeros(shape, device=device).to(
                    memory_format=torch.channels_last if last else torch.contiguous_format
                )
                for shape, last in zip(shapes, layout, strict=True)
            )  # fmt: skip
            options = [1, 1], [width // 2] * 2, [1, 1], transposed, [0, 0], groups
            result = torch.ops.aten.convolution(images, weight, None, *options)
            mask = [True, True, False]
            gradients = torch.ops.aten.convolution_backward(
                torch.zeros_like(result), images, weight, None, *options, mask
            )[:2]  # fmt: skip
            found.append([*map(layouts, (result, *gradients))])
    return found


def simulated() -> tuple[list[list[tuple[bool, bool]]], list[bool]]:
    """The same on a simulated GPU, and which of its convolutions are recorded with channels last."""
    held = Capture()
    with simulated_device(held, rank=0, world=1, kind="cuda") as fake, fake, Dispatch(held):
        found = convolved(SIM)
    kernels = [item for item in held.records if isinstance(item, Kernel) and "convolution" in item.op]
    return found, ["channels_last" in item.attributes for item in kernels]


def test_channels_are_last_where_those_of_images_or_weights_are():
    ours, marked = in_the_simulator(simulated)
    assert ours == convolved("cpu")
    assert marked == [any(layout) for _ in SHAPES for layout in LAYOUTS for _ in range(2)]


def test_double_precision_has_no_channels_last():
    images = torch.zeros(2, 4, 8, 8).to(memory_format=torch.channels_last)
    weight = torch.zeros(4, 4, 3, 3)
    assert convolves_channels_last(images, weight)
    assert not convolves_channels_last(images.double(), weight.double())
