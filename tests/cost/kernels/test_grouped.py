"""Products by groups, as of experts: their work, and their times beside published ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from legoai.cost.kernels.kinds import Product
from legoai.cost.kernels.roofline import ProductCurve
from legoai.cost.kernels.work import work_of
from legoai.cost.machine.kernel_time import GROUPED, products_of, seconds_of
from legoai.cost.profiles import profile
from legoai.cost.trace.records import Kernel, TensorType
from legoai.specs.dtypes import ITEM_BYTES


def grouped(left: tuple[int, ...], right: tuple[int, ...], output: tuple[int, ...]) -> Product:
    """The work of `torch._grouped_mm` on tensors of these shapes."""
    tensors = [TensorType(shape, "bfloat16") for shape in (left, right, output)]
    size = [math.prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors]
    kernel = Kernel(
        stream=0, op="aten._grouped_mm.default", inputs=tuple(tensors[:2]), outputs=(tensors[2],), flops=0,
        bytes_read=sum(size[:2]), bytes_written=size[2], attributes={}, module="", phase="forward",
    )  # fmt: skip
    found = work_of(kernel)
    assert isinstance(found, Product)
    return found


@pytest.mark.parametrize(
    ("left", "right", "output", "expected"),
    [
        ((80, 32), (10, 32, 4), (80, 4), (10, 8, 4, 32, 8)),
        ((10, 8, 32), (10, 32, 4), (10, 8, 4), (10, 8, 4, 32, 8)),
        ((10, 8, 32), (32, 40), (8, 40), (10, 8, 4, 32, 4)),
        # The gradients of ten experts' weights: each sums over its own eight rows.
        ((32, 80), (80, 4), (10, 32, 4), (10, 32, 4, 8, 8)),
    ],
    ids=["rows", "stacks", "columns", "sums"],
)
def test_work_is_that_of_equal_groups(left, right, output, expected) -> None:
    found = grouped(left, right, output)
    assert (found.batch, found.m, found.n, found.k, found.group) == expected
    assert found.grouped and found.flops == 2 * 80 * 32 * 4


@pytest.mark.parametrize(
    ("device", "groups", "rows", "k", "n", "milliseconds"),
    # pytorch/pytorch#163425, groups of unequal rows; the backward of the same products took twice as long.
    [
        ("h200", 32, 32768, 6144, 2048, 1.45), ("h200", 32, 32768, 2048, 6144, 1.47),
        ("h200", 32, 65536, 6144, 2048, 2.71), ("h200", 32, 65536, 2048, 6144, 2.77),
    ],
)  # fmt: skip
def test_times_agree_with_published_ones(device, groups, rows, k, n, milliseconds) -> None:
    forward = grouped((rows, k), (groups, k, n), (rows, n))
    assert seconds_of(forward, profile(device))[0] == pytest.approx(milliseconds * 1e-3, rel=0.05)
    backward = grouped((rows, n), (groups, n, k), (rows, k)), grouped((k, rows), (rows, n), (groups, k, n))
    assert sum(seconds_of(part, profile(device))[0] for part in backward) == pytest.approx(
        2 * milliseconds * 1e-3, rel=0.05
    )


@pytest.mark.parametrize("name", ["h100_sxm", "h100_sxm96", "h200", "b200"])
def test_products_by_groups_are_slower_than_single_ones(name: str) -> None:
    of_experts = [grouped((32768, 4096), (count, 4096, 2048), (32768, 2048)) for count in (4, 16, 64)]
    seconds = [seconds_of(one, profile(name))[0] for one in of_experts]
    single = Product(batch=1, m=32768, n=2048, k=4096, rate="bf16", bytes=of_experts[0].bytes)
    assert [seconds_of(single, profile(name))[0], *seconds] == sorted([seconds_of(single, profile(name))[0], *seconds])


def test_rates_without_a_model_of_groups_have_that_of_single_products() -> None:
    work = grouped((64, 32), (4, 32, 16), (64, 16))
    assert products_of(work, profile("h100_sxm")) == f"bf16{GROUPED}"
    assert products_of(work, profile("a100_sxm80")) == "bf16"
    assert products_of(replace(work, group=0), profile("h100_sxm")) == "bf16"


def test_curve_makes_groups_longer() -> None:
    document = {
        "peak": 1e12, "bandwidth": 1e12, "efficiency": 1.0, "sustained": None, "floor": 0.0, "processors": 1,
        "tiles": [[16, 16, 1.0]], "split": 256,
    }  # fmt: skip
    work = Product(batch=4, m=32, n=16, k=16, rate="bf16", bytes=0, group=32)
    plain, longer = ProductCurve.read(document), ProductCurve.read({**document, "more_of_group": 8.0})
    assert longer.seconds(work) == pytest.approx(plain.seconds(work) * 40 / 32)
    assert longer.seconds(replace(work, group=0)) == plain.seconds(work)
