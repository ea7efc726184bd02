"""Predicted convolutions are near those that were measured on a GPU."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict

import pytest
from benchmarks.fit_convolutions import GAP, MEASURED, kernels

from legoai.cost.kernels.convolutions import class_of
from legoai.cost.machine.kernel_time import estimate
from legoai.cost.profiles import profile


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    """Relative errors of the times of a forward and of whole backwards, by class."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in json.loads(MEASURED.read_text("utf-8"))["rows"]:
        for direction, kernel in kernels(row) if row["kind"] == "convolution" else ():
            seconds = row[f"{direction}_us"] * 1e-6 - GAP
            found[class_of(kernel)].append(estimate(kernel, profile("h200"))[0] / seconds - 1)
    return found


@pytest.mark.parametrize(
    ("name", "count", "mean"),
    [("product", 64, 0.2), ("depthwise", 24, 0.06), ("unaligned", 24, 0.4), ("narrow", 8, 0.4)],
)
def test_convolutions_are_predicted_as_measured(errors, name, count, mean):
    assert len(errors[name]) == count
    assert statistics.mean(map(abs, errors[name])) < mean
