"""Shares by which figures miss what is required of them, and figures of steps with two treatments of their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from legoai.cost.requirements import within
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.specs.directives.require import Requirement


def misses(metrics: Mapping[str, float], requirements: Sequence[Requirement], device: float) -> Iterator[float]:
    """Yield for the device's memory and for each requirement the share by which it is missed; 0 where it is met.

    Args:
        metrics: figures by name and dimension, as :class:`legoai.cost.search.evaluation.evaluator.Figures` has them.
        requirements: of the plan.
        device: bytes of its memory.
    """
    yield max(0.0, metrics["reserved_memory bytes"] / device - 1.0)
    for item in requirements:
        value = metrics[f"{item.metric} {item.dimension}"]
        yield 0.0 if within(value, item) else abs(value - item.bound) / (abs(item.bound) or 1.0)


def nearest(evaluated: Sequence[Figures], requirements: Sequence[Requirement], device: float) -> tuple[float, float]:
    """How near some candidates come to their requirements, those that come nearest least.

    The first number is the share by which a requirement is missed by each of them; as long as it is 0, a division of
    their blocks may meet all. The second is the share by which the nearest candidate misses one.
    """
    found = [list(misses(one.metrics, requirements, device)) for one in evaluated]
    return max(min(each) for each in zip(*found, strict=True)), min(max(one) for one in found)


def mean_of(one: Figures, other: Figures, share: float) -> dict[str, float]:
    """The mean of two steps' figures, the first with a share: what blocks compute and keep adds up over them."""
    return {name: share * value + (1.0 - share) * other.metrics[name] for name, value in one.metrics.items()}
