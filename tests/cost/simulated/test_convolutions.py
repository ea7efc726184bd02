"""FLOPs of convolutions are the multiply-adds that they need, in both directions and whatever the groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from legoai.cost.simulated.operators import flops, operator

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
