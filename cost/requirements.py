"""Values of a plan's `require` lines."""

from __future__ import annotations

from dataclasses import dataclass

from legoai.specs.directives.require import Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementResult:
    """A `require` line and the estimate's value for it.

    Attributes:
        requirement: of the plan.
        value: in the requirement's dimension.
        ok: whether the value is within the bound.
    """

    requirement: Requirement
    value: float
    ok: bool


def checked(item: Requirement, value: float) -> RequirementResult:
    """Return the result of a requirement for a value."""
    return RequirementResult(requirement=item, value=value, ok=within(value, item))


def within(value: float, item: Requirement) -> bool:
    """Whether a figure, in the dimension of a requirement, meets it."""
    return {
        "<=": value <= item.bound,
        "<": value < item.bound,
        ">=": value >= item.bound,
        ">": value > item.bound,
        "==": value == item.bound,
    }[item.comparison]
