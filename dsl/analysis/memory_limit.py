"""Limit of the memory that passes over a graph count."""

from __future__ import annotations

from legoai.specs.plan import Plan


def how_to_limit(plan: Plan) -> str:
    """Return the help for a plan without a limit of active memory, which is what passes over a graph count."""
    for item in plan.require:
        if item.limits_memory:
            return (
                f"add `require peak_memory {item.limit}`: passes over a graph count active memory, for which "
                f"`{item.metric}` leaves no limit, since it depends on the allocator"
            )
    return "add `require peak_memory <= 70GiB`, with the bytes that a step may take"
