"""Work of convolutions: products of their implicit form, or arithmetic of the vector units.

The rates are those of an H200 with torch's own layout, channels first (`benchmarks/results/gpu_kernels_h200.json`).
There cuDNN's products on tensor cores want channels last, in multiples of 16 bytes: it converts operands and results,
and falls back to the vector units where the channels do not fit, as of an image's three. Convolutions of narrow groups
have kernels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple

from legoai.cost.kernels.kinds import ALIGNED, Consecutive, Movement, Product
from legoai.cost.trace.records import Kernel, TensorType
from legoai.specs.dtypes import ITEM_BYTES

ConvolutionClass = Literal["product", "unaligned", "narrow", "depthwise"]
Direction = Literal["forward", "input", "weight"]
"""The result of forward, or the gradient of the input or of the weight."""

_CORE_CHANNELS: Final = 16
"""Channels of a group below which no product of tensor cores is full: those of one instruction, `mma.m16n8k16`. Groups
of a single channel have kernels of PyTorch's own (`_select_conv_backend` of ATen/native/Convolution.cpp)."""
_ALIGNED_POSITIONS: Final = 8
"""Multiples of positions with which a filter of one element is a product of the operands as they are."""
_SHARES: Final[Mapping[tuple[ConvolutionClass, Direction], float]] = {
    ("unaligned", "forward"): 0.355,
    ("unaligned", "input"): 0.22,
    ("unaligned", "weight"): 0.45,
    ("narrow", "forward"): 0.129,
    ("narrow", "input"): 0.081,
    ("narrow", "weight"): 0.075,
    ("depthwise", "forward"): 0.042,
    ("depthwise", "input"): 0.032,
    ("depthwise", "weight"): 0.0221,
}
"""Rates in single precision, which all dtypes are computed in, as shares of the vector units': medians of
`benchmarks/fit_convolutions.py`, and for the weight of a depthwise convolution what long sums reach."""
_LAST_SHARES: Final[Mapping[str, tuple[float, float]]] = {"bf16": (0.163, 0.116), "tf32": (0.069, 0.0095)}
"""Of a depthwise convolution whose channels are last in memory, which cuDNN computes, by the rate of its dtype: that of
forward, and that of either gradient, in steps of a ConvNeXt V2 (`benchmarks/results/gpu_images_h200.json`)."""
_SUM_FLOPS: Final = 6470
"""Arithmetic that takes as long as starting and ending the sum for one element of a depthwise convolution's weight."""


class _Convolution(NamedTuple):
    x: TensorType
    weight: TensorType
    result: TensorType
    groups: int
    channels_last: bool
    flops: float
    """Of one direction."""


def convolution(kernel: Kernel, rate: str, *, cores: bool) -> Product | Movement | Consecutive:
    """A convolution as the product that its implicit form computes; a backward has one kernel for each gradient.

    Args:
        kernel: of `aten.convolution`, or of its backward.
        rate: the name of its dtype's rate of products.
        cores: whether the device has tensor cores, as cuDNN uses them.
    """
    one, directions, of_bias = _read(kernel)
    parts = [part for direction in directions for part in _parts(one, direction, rate, cores=cores)]
    if of_bias:  # no backend computes it with the others (`convolution_backward` of ATen/native/Convolution.cpp)
        parts.append(Movement(kind="reduction", bytes=_size_of(one.result)))
    return parts[0] if len(parts) == 1 else Consecutive(tuple(parts))


def is_unmeasured(kernel: Kernel) -> bool:
    """Whether no measurement has a convolution's layout: channels last, of too few bytes for products as others have.

    Its rates are those with channels first. cuDNN has kernels on tensor cores for the first layer of images with
    channels last: on an A100, 7 by 7 filters on 128 images of 4 channels have their weight's gradient in 0.46 ms
    (NVIDIA/cutlass#793), an eighth of what the rates here give.
    """
    convolves = kernel.op.startswith("aten.convolution")
    return convolves and "channels_last" in kernel.attributes and class_of(kernel) == "unaligned"


def class_of(kernel: Kernel) -> ConvolutionClass:
    """Return how a GPU with tensor cores computes a convolution."""
    return _class_of(_read(kernel)[0])


def _read(kernel: Kernel) -> tuple[_Convolution, tuple[Direction, ...], bool]:
    """The convolution of a kernel, the directions that it computes, and whether it sums the gradient of a bias."""
    groups, last = kernel.attributes.get("groups", 1), "channels_last" in kernel.attributes
    if "backward" not in kernel.op:
        [result, *_], [x, weight, *_] = kernel.outputs, kernel.inputs
        return _Convolution(x, weight, result, groups, last, kernel.flops), ("forward",), False
    result, x, weight = kernel.inputs[:3]
    of_input, of_weight, of_bias = kernel.attributes.get("output_mask", (True, True, False))
    directions: tuple[Direction, ...] = (*(("input",) if of_input else ()), *(("weight",) if of_weight else ()))
    return _Convolution(x, weight, result, groups, last, kernel.flops / max(1, len(directions))), directions, of_bias


def _class_of(one: _Convolution) -> ConvolutionClass:
    channels, filters = one.weight.shape[1], one.weight.shape[0] // one.groups
    if one.groups > 1 and min(channels, filters) < _CORE_CHANNELS:
        return "depthwise" if channels == 1 else "narrow"
    aligned = ALIGNED // ITEM_BYTES[one.weight.dtype]
    return "unaligned" if channels % aligned or filters % aligned else "product"


def _parts(one: _Convolution, direction: Direction, rate: str, *, cores: bool) -> Iterator[Product | Movement]:
    moved = _size_of(one.x, one.weight, one.result)  # each direction reads two of them, and writes the third
    kind = _class_of(one)
    if kind == "depthwise" and cores and one.channels_last:
        share = _LAST_SHARES.get(rate, _LAST_SHARES["bf16"])[direction != "forward"]
        yield Movement(kind="elementwise", bytes=moved, flops=one.flops / share)
        return
    if kind != "product" and cores:
        sums = _SUM_FLOPS * math.prod(one.weight.shape) if (kind, direction) == ("depthwise", "weight") else 0
        yield Movement(kind="elementwise", bytes=moved, flops=(one.flops + sums) / _SHARES[kind, direction])
        return
    if kind in ("narrow", "depthwise"):
        yield Movement(kind="elementwise", bytes=moved, rate=rate, flops=one.flops)
        return
    if cores and not one.channels_last and not _is_plain(one):
        yield Movement(kind="copy", form="unvectorised", bytes=2 * _size_of(one.x, one.result))
    if direction == "weight":
        m, n = one.weight.shape[0] // one.groups, math.prod(one.weight.shape[1:])
    else:
        given = one.result if direction == "forward" else one.x
        m, n = given.shape[0] * math.prod(given.shape[2:]), given.shape[1] // one.groups
    k = max(1, round(one.flops / (2 * one.groups * m * n)))
    yield Product(batch=one.groups, m=m, n=n, k=k, rate=rate, bytes=moved)


def _is_plain(one: _Convolution) -> bool:
    """Whether a convolution is a product of its operands as they lie in memory."""
    positions = math.prod(one.x.shape[2:])
    of_one_element = math.prod(one.weight.shape[2:]) == 1 and one.x.shape[2:] == one.result.shape[2:]
    return of_one_element and one.groups == 1 and positions % _ALIGNED_POSITIONS == 0


def _size_of(*tensors: TensorType) -> int:
    return sum(math.prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors)
