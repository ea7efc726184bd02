"""Sides from which requirements bound a figure."""

from __future__ import annotations

import pytest

from legoai.specs.directives.require import COMPARISONS, MEMORY_METRICS, METRICS, Requirement

SIDES = {"<=": (True, False), "<": (True, False), ">=": (False, True), ">": (False, True), "==": (True, True)}


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_exact_requirement_bounds_from_both_sides(comparison: str):
    for metric in METRICS:
        item = Requirement(metric=metric, comparison=comparison, bound=1.0, dimension=METRICS[metric].dimensions[0])
        above, below = SIDES[comparison]
        assert (item.bounds_above, item.bounds_below) == (above, below)
        assert item.limits_memory == (above and metric in MEMORY_METRICS)
