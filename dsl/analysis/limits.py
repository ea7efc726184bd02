"""Limits that a plan requires, as far as its lowering keeps to them."""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.analysis import Analysis

_UPPER: Final = ("<=", "<", "==")


def memory_limit(analysis: Analysis) -> int | None:
    """The most bytes that a device may hold, by the plan's own requirements; None where they say nothing of it."""
    bounds = [
        item.bound for item in analysis.plan.require if item.metric == "peak_memory" and item.comparison in _UPPER
    ]
    return int(min(bounds)) if bounds else None
