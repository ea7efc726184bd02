"""Corrections by size, and their acceptance only where they reduce the error."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from legoai.cost.calibration.correction import Correction, Trial, left_out, repeated
from legoai.cost.calibration.update import corrected


def test_correction_interpolates_and_extrapolates_by_holding_or_fading() -> None:
    pairs = [(2.0**10, 2.0), (2.0**12, 8.0)]
    holds, fades = (Correction.of(pairs, holds=how, octaves=0.0) for how in (True, False))
    for one in (holds, fades):
        assert one.at(2.0**10) == pytest.approx(2) and one.at(2.0**11) == pytest.approx(4)
        assert one.at(2.0**12) == pytest.approx(8)
    assert (holds.at(1), holds.at(2.0**40)) == pytest.approx((2, 8))
    assert fades.at(2.0**14) == pytest.approx(8) and fades.at(2.0**15) == pytest.approx(8**0.5)
    assert fades.at(2.0**16) == fades.at(2.0**40) == fades.at(1) == pytest.approx(1)


def test_sizes_within_an_octave_are_merged() -> None:
    pairs = [(1000.0, 2.0), (1010.0, 4.0), (1020.0, 8.0), (2.0**20, 1.0)]
    found = Correction.of(pairs, holds=True, octaves=1.0)
    assert found.at(1010) == pytest.approx(4) and len(found.sizes) == 2


def test_trial_uses_held_out_times() -> None:
    trial = repeated([("a", [1.0, 2.0, 1.0, 2.0]), ("once", [5.0])], lambda _: 4.0, statistics.median)
    assert (trial.before["median"], trial.after["median"], trial.after["rows"]) == (1.0, 0.5, 1)
    assert trial.better and not Trial.of([], [], []).better
    seen: list[list[int]] = []

    def fit(known: list[tuple[int, float]]):
        seen.append([what for what, _ in known])
        return float

    trial = left_out([(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)], lambda what: 2.0 * what, fit)
    assert seen == [[2, 3, 4], [1, 3, 4], [1, 2, 4], [1, 2, 3]]
    assert (trial.before["median"], trial.after["median"]) == (1.0, 0.0)


def test_fit_with_the_smaller_median_error_is_better_than_a_base_that_predicts_next_to_nothing() -> None:
    trial = Trial.of([1.0] * 5, [0.05] * 5, [1.1, 0.9, 1.0, 1.2, 8.0])
    assert trial.after["mean"] > trial.before["mean"]
    assert trial.better


def test_correction_is_applied_only_if_it_reduces_the_error() -> None:
    def base(size: float) -> float:
        return 1e-6 + size / 1e9

    def tried(factors: list[float], times: int = 2):
        samples = [
            (2.0 ** (12 + 2 * index), [base(2.0 ** (12 + 2 * index)) * f] * times) for index, f in enumerate(factors)
        ]
        return corrected("part", samples, base, float, octaves=0.0, typical=min)

    part, correction = tried([1.5] * 5)
    assert correction is not None and correction.holds and part.result == "measured"
    assert correction.at(2.0**40) == pytest.approx(1.5)
    part, correction = tried([1.0] * 5)
    assert correction is None and part.result == "kept"
    part, correction = tried([1.5, 3.0])  # too few sizes to see whether others are like them
    assert correction is not None and not correction.holds
    part, correction = tried([1.5, 3.0], times=1)
    assert correction is None and "nothing could be held out" in part.how
    part, correction = tried([4.0, 0.25, 4.0, 0.25, 4.0])  # no neighbour is like the next, yet each is as it was
    assert correction is not None and not correction.holds


def test_observed_times_lower_the_search_bound(tmp_path: Path) -> None:
    from dataclasses import replace

    from legoai.cost.kernels.kinds import Product
    from legoai.cost.kernels.table import Table
    from legoai.cost.machine.kernel_time import seconds_of
    from legoai.cost.profiles import profile
    from legoai.cost.search.lower_bounds.layers import fastest_rate

    base = profile("h100_sxm")
    model = base.products["bf16"]
    work = Product(batch=1, m=8192, n=8192, k=8192, rate="bf16", bytes=6 * 8192**2)
    observed = Table(points=((0.0, 13.0, 13.0, 13.0),), ratios=(-2.0,), reach=0.25)
    fast = replace(base, products={**base.products, "bf16": replace(model, observed=observed)}, answers={})
    seconds, label = seconds_of(work, fast)
    assert label == "measured table" and seconds == pytest.approx(model.curve.seconds(work) * 2.718281828**-2)
    assert fastest_rate(model) < work.flops / seconds <= fastest_rate(fast.products["bf16"])
    assert fastest_rate(model) >= work.flops / seconds_of(work, base)[0]
