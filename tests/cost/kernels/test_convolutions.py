"""Work and time of convolutions: products of their implicit form, one for each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legoai.cost.assumptions import of_convolutions
from legoai.cost.kernels.kinds import Consecutive, Movement, Product, Work
from legoai.cost.kernels.work import work_of
from legoai.cost.machine.cluster import machine_of
from legoai.cost.machine.contention import beside_collectives
from legoai.cost.machine.kernel_time import estimate, work_on
from legoai.cost.profiles import profile
from legoai.cost.simulated.operators.properties import description, operator, tensors
from legoai.cost.trace.records import Kernel
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.specs.directives.cluster import ClusterUse


def recorded(func: OpOverload, arguments: Sequence[object]) -> Kernel:
    """The kernel that the simulator records for a call."""
    out = func(*arguments)
    said = description(
        func, operator(func), arguments, {}, inputs=list(tensors(arguments)), fresh=list(tensors(out)), out=out
    )
    return Kernel(stream=0, module="", phase="other", **said)


def convolution(
    batch: int,
    channels: int,
    outputs: int,
    size: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    mask: tuple[bool, bool, bool] = (True, True, False),
    channels_last: bool = False,
) -> tuple[Kernel, Kernel]:
    """A convolution of squares, padded to keep their size, and its backward."""
    x = torch.empty(batch, channels, size, size, dtype=dtype, device="meta")
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight = torch.empty(outputs, channels // groups, kernel, kernel, dtype=dtype, device="meta")
    rest = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    forward = torch.ops.aten.convolution.default
    result = forward(x, weight, None, *rest)
    backward = torch.ops.aten.convolution_backward.default
    return recorded(forward, (x, weight, None, *rest)), recorded(
        backward, (result, x, weight, [outputs] if mask[2] else None, *rest, mask)
    )


def shape(work: Work) -> tuple[int, int, int, int]:
    assert isinstance(work, Product)
    return work.batch, work.m, work.n, work.k


def seconds(kernel: Kernel, name: str = "h100_sxm") -> float:
    return estimate(kernel, profile(name))[0]


def test_backward_has_a_product_for_each_gradient():
    forward, backward = map(work_of, convolution(8, 64, 128, 28, 3))
    assert isinstance(backward, Consecutive)
    of_input, of_weight = backward.parts
    assert shape(forward) == (1, 8 * 28 * 28, 128, 64 * 9)
    assert shape(of_input) == (1, 8 * 28 * 28, 64, 128 * 9)
    assert shape(of_weight) == (1, 128, 64 * 9, 8 * 28 * 28)


def test_strided_backward_multiplies_as_often_as_forward():
    forward, backward = map(work_of, convolution(8, 64, 128, 28, 3, stride=2))
    assert isinstance(forward, Product) and isinstance(backward, Consecutive)
    assert [part.flops for part in backward.parts] == [pytest.approx(forward.flops)] * 2


def test_gradients_take_the_sum_of_their_times():
    _, both = convolution(8, 64, 128, 28, 3)
    alone = [convolution(8, 64, 128, 28, 3, mask=mask)[1] for mask in ((True, False, False), (False, True, False))]
    assert all(isinstance(work_of(item), Product) for item in alone)
    assert seconds(both) == pytest.approx(sum(map(seconds, alone)))


def test_gradient_of_a_bias_is_a_sum_of_the_results_gradient():
    _, backward = convolution(8, 64, 128, 28, 3, mask=(False, False, True))
    assert work_of(backward) == Movement(kind="reduction", bytes=2 * 8 * 128 * 28 * 28)


def test_backward_beside_a_collective_is_slowed_as_its_products_are():
    _, backward = convolution(8, 64, 128, 28, 3)
    work, h100 = work_of(backward), profile("h100_sxm")
    assert isinstance(work, Consecutive)
    assert beside_collectives(work, h100) == pytest.approx(beside_collectives(work.parts[0], h100))


def on(kernel: Kernel, name: str = "h100_sxm") -> tuple[Work, ...]:
    work = work_on(kernel, profile(name))
    return work.parts if isinstance(work, Consecutive) else (work,)


def test_gpu_converts_operands_and_results_to_channels_last():
    forward, backward = convolution(8, 64, 128, 28, 3)
    moved = 2 * 2 * 8 * 28 * 28 * (64 + 128)
    conversion = Movement(kind="copy", form="unvectorised", bytes=moved)
    assert [type(part) for part in on(backward)] == [Movement, Product] * 2
    assert on(forward)[0] == on(backward)[0] == conversion
    assert seconds(forward, "cpu") and on(forward, "cpu") == (work_of(forward),)


def test_images_with_channels_last_are_not_converted():
    forward, backward = convolution(8, 64, 128, 28, 3, channels_last=True)
    assert [type(part) for part in (*on(forward), *on(backward))] == [Product] * 3
    for dtype in (torch.bfloat16, torch.float32):
        last, first = (
            convolution(32, 352, 352, 56, 7, groups=352, dtype=dtype, channels_last=last)[0] for last in (True, False)
        )
        assert seconds(last) < seconds(first)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "plain"), [(28, 1, 1, True), (7, 1, 1, False), (28, 1, 2, False), (28, 3, 1, False)]
)
def test_filter_of_one_element_is_a_product_of_what_lies_in_memory(size, kernel, stride, plain):
    forward, _ = convolution(8, 64, 128, size, kernel, stride=stride)
    assert (len(on(forward)) == 1) is plain


@pytest.mark.parametrize(("channels", "dtype", "aligned"), [
    (3, torch.bfloat16, False), (4, torch.bfloat16, False), (8, torch.bfloat16, True), (3, torch.float32, False),
    (4, torch.float32, True),
])  # fmt: skip
def test_channels_that_fill_no_vector_are_computed_without_tensor_cores(channels, dtype, aligned):
    for kernel in convolution(8, channels, 64, 56, 7, dtype=dtype):
        assert any(isinstance(part, Product) for part in on(kernel)) is aligned


def test_wide_groups_are_products_of_their_own():
    forward, backward = map(work_of, convolution(8, 128, 256, 28, 3, groups=4))
    assert isinstance(backward, Consecutive)
    assert shape(forward) == (4, 8 * 28 * 28, 64, 32 * 9)
    assert [shape(part) for part in backward.parts] == [(4, 8 * 28 * 28, 32, 64 * 9), (4, 64, 32 * 9, 8 * 28 * 28)]


@pytest.mark.parametrize("groups", [32, 128])
def test_narrow_groups_take_their_bytes_or_operations_of_the_vector_units(groups: int):
    forward, backward = convolution(8, 128, 128, 28, 7, groups=groups)
    works = work_of(forward), work_of(backward)
    assert isinstance(works[0], Movement) and isinstance(works[1], Consecutive)
    assert works[0].flops == forward.flops and works[0].bytes == forward.bytes_read + forward.bytes_written
    assert works[1].parts == (works[0], works[0])
    assert all(isinstance(part, Movement) and part.flops > forward.flops for part in (*on(forward), *on(backward)))


def test_depthwise_backward_takes_several_times_its_forward():
    """The weight of ConvNeXt-V2's first stage: 352 channels of which each has a 7 by 7 filter."""
    forward, backward = convolution(32, 352, 352, 56, 7, groups=352)
    assert 2 * seconds(forward) < seconds(backward) < 5 * seconds(forward)


def test_device_without_stated_vector_rate_has_that_of_its_fp32_products():
    forward, _ = convolution(8, 128, 128, 28, 7, groups=128, dtype=torch.float32)
    curve = profile("cpu").products["fp32"].curve
    assert seconds(forward, "cpu") >= forward.flops / (curve.peak * curve.efficiency) > 0
    assert seconds(forward, "cpu") > profile("cpu").moving("elementwise")[0].seconds(forward.bytes_read)


@pytest.mark.parametrize("name", ["a100_sxm80", "h100_sxm", "b200"])
def test_fp32_convolutions_use_tf32_as_pytorch_lets_them(name: str):
    assert torch.backends.cudnn.allow_tf32
    of_each = [convolution(64, 256, 256, 28, 3, dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16)]
    works = [work_on(item, profile(name)) for item in of_each]
    products = [part for work in works if isinstance(work, Consecutive) for part in work.parts]
    assert [part.rate for part in products if isinstance(part, Product)] == ["tf32", "bf16"]
    single, half = (estimate(item, profile(name))[0] for item in of_each)
    assert 1.2 * half < single < 3 * half


def test_processor_without_tf32_computes_fp32_convolutions_in_fp32():
    forward, _ = convolution(8, 64, 128, 28, 3, dtype=torch.float32)
    work = work_on(forward, profile("cpu"))
    assert isinstance(work, Product) and work.rate == "fp32"


def test_first_layers_with_channels_last_are_assumed_to_be_as_fast_as_with_channels_first():
    def said(channels: int, share: float, *, last: bool = True, device: str = "a100_sxm80") -> list[str]:
        machine = machine_of(ClusterUse(device=device), 1, directory=Path())
        pair = convolution(256, channels, 64, 224, 7, stride=2, channels_last=last)
        kernels = [replace(kernel, module="stem") for kernel in pair]
        taken = sum(estimate(kernel, machine.profile)[0] for kernel in kernels)
        return list(of_convolutions({0: kernels}, machine, taken / share))

    [found] = said(3, 0.13)
    assert found.startswith("13% of the step are convolutions of images with channels last") and "(`stem`)" in found
    assert said(3, 0.02) == said(3, 0.5, last=False) == said(8, 0.5) == said(3, 0.5, device="cpu") == []
