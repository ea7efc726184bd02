"""Published ratios of two configurations, and the ratios of the simulated plans that state them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks.validation.predict import Prediction

Metric = Literal["throughput", "memory", "allocated"]
"""Tokens per second; peak of reserved memory, as TorchTitan reports it; or peak of active memory."""
SAME: Final = 0.01
"""Ratios closer to 1 than this count as no change."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A plan with a number from the simulation of another plan.

    Attributes:
        first: text of the other plan.
        then: writes the plan, given the prediction for the other one.
    """

    first: str
    then: Callable[[Prediction], str]


Text = str | Filled


@dataclass(frozen=True, slots=True)
class Pair:
    """Two plans, with and without the measured feature, and a description of the settings that they share."""

    settings: str
    changed: Text
    baseline: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published ratio of two measurements.

    Attributes:
        rows: ids of its rows in the file of published figures.
        of: the paper's table or section.
        what: the compared feature, in words.
        metric: the measured quantity; the ratio is that of the changed run to the baseline.
        published: the ratio, or both ends of a range.
        qualifier: the paper's own: `average`, `up to`, …; empty for a measurement.
        pairs: pairs of plans whose simulated ratios are compared with it.
        differs: how the plans differ from the runs.
    """

    rows: tuple[str, ...]
    of: str
    what: str
    metric: Metric
    published: tuple[float, ...]
    pairs: tuple[Pair, ...]
    qualifier: str = ""
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unstated:
    """Rows that no plan states, with the reason."""

    rows: tuple[str, ...]
    what: str
    why: str


def plans(claims: Sequence[Claim]) -> dict[str, None]:
    """The plans that are known before anything is simulated, in their order."""
    texts = [text for claim in claims for pair in claim.pairs for text in (pair.baseline, pair.changed)]
    return dict.fromkeys(text if isinstance(text, str) else text.first for text in texts)


def ratio(metric: Metric, changed: Prediction, baseline: Prediction) -> float | None:
    """The metric's ratio of the changed plan to the baseline; both plans compute the same tokens."""
    if changed.refused or baseline.refused:
        return None
    if metric == "allocated":
        return max(changed.active) / max(baseline.active)
    if metric == "memory":
        return max(changed.reserved) / max(baseline.reserved)
    assert changed.seconds and baseline.seconds, "a plan that is simulated takes time"
    return baseline.seconds / changed.seconds


def direction(value: float) -> int:
    """1, -1 or 0 for a ratio above 1, below 1, or equal to it within `SAME`."""
    return 0 if abs(value - 1) < SAME else 1 if value > 1 else -1


def compared(claim: Claim, answers: Mapping[Text, Prediction]) -> dict[str, Any]:
    """A claim and its simulated ratios, as JSON values."""
    found = []
    for pair in claim.pairs:
        changed, baseline = answers[pair.changed], answers[pair.baseline]
        refused = changed.refused or baseline.refused
        found.append({
            "settings": pair.settings,
            "ratio": ratio(claim.metric, changed, baseline),
            "changed": figures(changed),
            "baseline": figures(baseline),
            **({"refused": refused} if refused else {}),
        })  # fmt: skip
    ratios = [item["ratio"] for item in found if item["ratio"] is not None]
    predicted = _summed(claim.qualifier, ratios) if len(ratios) == len(found) else None
    return {
        "rows": claim.rows,
        "of": claim.of,
        "what": claim.what,
        "metric": claim.metric,
        "published": claim.published,
        "qualifier": claim.qualifier,
        "predicted": predicted,
        "direction": None if predicted is None else agrees(claim.published, predicted),
        "simulated": found,
        "differs": claim.differs,
    }


def _summed(qualifier: str, ratios: Sequence[float]) -> float:
    """One figure for several settings: the largest where the paper states `up to`, their mean otherwise."""
    return max(ratios) if qualifier.startswith("up to") else statistics.fmean(ratios)


def agrees(published: Sequence[float], predicted: float) -> bool:
    """Whether a predicted ratio has the direction of the published one; both are 0 within 1% of a ratio of 1."""
    return direction(statistics.fmean(published)) == direction(predicted)


def figures(predicted: Prediction) -> dict[str, Any]:
    """The figures of a prediction that are reported with a ratio."""
    if predicted.refused:
        return {"refused": predicted.refused}
    return {
        "seconds": predicted.seconds,
        "exposed_s": predicted.exposed,
        "active_gib": max(predicted.active) / 2**30,
        "reserved_gib": max(predicted.reserved) / 2**30,
    }
