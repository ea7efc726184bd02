"""Measured rates of products whose rows are not aligned, and of products by groups."""

from __future__ import annotations

import pytest

from legoai.cost.calibration.kernels import products_by_groups, unaligned_products
from legoai.cost.calibration.timing import Timer
from legoai.cost.kernels.kinds import Product
from legoai.cost.kernels.roofline import ProductCurve
from legoai.cost.machine.kernel_time import knows_narrow_rates
from legoai.cost.profiles import profile

CURVE = {
    "peak": 1e12, "bandwidth": 1e11, "efficiency": 1.0, "sustained": None, "floor": 1e-7, "processors": 1,
    "tiles": [[16, 16, 1.0]], "split": 256,
}  # fmt: skip


def test_constants_are_those_of_shipped_profiles() -> None:
    found = unaligned_products(Timer(device="cpu"), CURVE, 0.04, 64)
    shipped = profile("h100_sxm")
    assert knows_narrow_rates(shipped)
    assert found.keys() == {name for name in shipped.constants if "_aligned_to_" in name}
    for constant in found.values():
        assert 1e6 < constant["value"] < 1e14
        assert constant["source"].startswith("measured here: a product of 64 by 6")


def test_time_without_the_floor_is_the_rates() -> None:
    class Fixed(Timer):
        def seconds(self, run, budget: float) -> float:  # type: ignore[override]
            run()
            return 3e-7

    found = unaligned_products(Fixed(device="cpu"), CURVE, 0.04, 64)
    # 80 columns in tiles of 16 for 65, and an inner dim of 64.
    assert found["result_aligned_to_2_flops_per_second"]["value"] == pytest.approx(2 * 64 * 80 * 64 / 2e-7)


def test_model_of_groups_gives_the_times_from_which_it_is_made() -> None:
    class OfCurve(Timer):
        def seconds(self, run, budget: float) -> float:  # type: ignore[override]
            rows = run().shape[0] // 8
            return known.seconds(Product(batch=8, m=rows, n=64, k=64, rate="bf16", bytes=0, group=rows))

    known = ProductCurve.read({**CURVE, "efficiency": 0.6, "more_of_group": 20.0})
    found = products_by_groups(OfCurve(device="cpu"), CURVE, 0.04, 64)["curve"]
    assert found["efficiency"] == pytest.approx(0.6)
    assert found["more_of_group"] == pytest.approx(20.0)


def test_groups_that_take_no_longer_are_not_longer() -> None:
    class Fixed(Timer):
        def seconds(self, run, budget: float) -> float:  # type: ignore[override]
            return 1e-3 * run().shape[0]

    found = products_by_groups(Fixed(device="cpu"), CURVE, 0.04, 64)["curve"]
    assert found["more_of_group"] == pytest.approx(0.0, abs=0.01)
    assert 0.0 < found["efficiency"] < 1.0
