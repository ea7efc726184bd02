"""Rankings of measured configurations, and the regret of each ranking's first choice.

The *regret* of a ranking in a group is 1 - t / b: t is the measured throughput of the configuration that it puts first,
b the highest measured throughput of the group. Where several configurations are first, t is their mean.

The *rule of thumb* takes the smallest product of tensor and pipeline parallel degrees, and of those the largest micro
batch. Ties are broken by the order of the file, as in the published figures of the rule; nanotron's file is ordered by
throughput, so that this order favours the rule, and the mean over ties is reported too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALLEST_GROUP = 4
"""Least number of configurations of a group: in smaller ones any choice is near the best."""
GOOD = 0.05
"""Largest regret of a good choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A measured configuration.

    Attributes:
        id: the row's id.
        group: key of the configurations that it competes with: equal model, devices and tokens of a step.
        tier: quality of its measured time, according to the file; empty if the file has no tiers.
        rate: measured tokens per second and device.
        model_parallel: tensor by pipeline parallel degree.
        micro_batch: sequences.
    """

    id: str
    group: str
    tier: str
    rate: float
    model_parallel: int
    micro_batch: int


def grouped(configurations: Iterable[Configuration]) -> dict[str, list[Configuration]]:
    """Configurations by group, of groups that are large enough, in the order of their names."""
    groups: dict[str, list[Configuration]] = {}
    for item in configurations:
        groups.setdefault(item.group, []).append(item)
    return {name: groups[name] for name in sorted(groups) if len(groups[name]) >= SMALLEST_GROUP}


def by_rule(group: Sequence[Configuration]) -> list[Configuration]:
    """The choice of the rule of thumb, with all ties, in the order of the file."""
    return first(group, lambda item: (item.model_parallel, -item.micro_batch))


def by_prediction(group: Sequence[Configuration], seconds: Mapping[str, float]) -> list[Configuration]:
    """The choice by predicted step time; configurations without a time, predicted not to fit, are not ranked."""
    return first([item for item in group if item.id in seconds], lambda item: seconds[item.id])


def first(group: Sequence[Configuration], key: Callable[[Configuration], Any]) -> list[Configuration]:
    """All configurations with the least key."""
    least = min(map(key, group), default=None)
    return [item for item in group if key(item) == least]


def regret(group: Sequence[Configuration], chosen: Sequence[Configuration]) -> float:
    """Share of the best measured throughput that the chosen ones lose; 1 if none is chosen."""
    if not chosen:
        return 1.0
    return 1.0 - statistics.fmean(item.rate for item in chosen) / max(item.rate for item in group)


def rank_correlation(group: Sequence[Configuration], seconds: Mapping[str, float]) -> float | None:
    """Spearman's correlation of measured and predicted throughput; None for fewer than three ranked ones."""
    ranked = [item for item in group if item.id in seconds]
    measured, predicted = (_ranks([item.rate for item in ranked]), _ranks([-seconds[item.id] for item in ranked]))
    if len(ranked) < 3 or len(set(measured)) == 1 or len(set(predicted)) == 1:
        return None
    return statistics.correlation(measured, predicted)


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from the smallest; ties get the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Regrets over groups."""

    groups: int
    mean: float
    p90: float
    good: float

    @staticmethod
    def of(regrets: Sequence[float]) -> Summary:
        """Summarise regrets of groups; the 90th percentile is the least value that nine tenths do not exceed."""
        ordered = sorted(regrets)
        return Summary(
            groups=len(ordered),
            mean=statistics.fmean(ordered),
            p90=ordered[-(-9 * len(ordered) // 10) - 1],
            good=sum(value <= GOOD for value in ordered) / len(ordered),
        )
