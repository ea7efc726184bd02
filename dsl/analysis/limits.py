"""Limits required by a plan, as far as its lowering observes them."""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.specs.directives.require import Requirement

_UPPER: Final = ("<=", "<", "==")


def memory_limits(analysis: Analysis) -> list[Requirement]:
    """Return the requirements that bound from above the bytes that a device may hold."""
    return [item for item in analysis.plan.require if item.metric == "peak_memory" and item.comparison in _UPPER]


def memory_limit(analysis: Analysis) -> int | None:
    """Return the most bytes that a device may hold by the plan's requirements; None where they set no limit."""
    bounds = [item.bound for item in memory_limits(analysis)]
    return int(min(bounds)) if bounds else None
