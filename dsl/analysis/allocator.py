"""Facts about the device's memory allocator."""

from __future__ import annotations

from legoai.specs.plan import Plan


def expandable_segments(plan: Plan) -> bool:
    """Whether segments of torch's caching allocator grow; without a statement they do not, which is torch's default."""
    return plan.allocator is not None and bool(plan.allocator.expandable_segments)
