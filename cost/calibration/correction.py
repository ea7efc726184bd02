"""Corrections of a model by measurements, and their errors on held-out measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from legoai.cost.calibration.movement import error_of

T = TypeVar("T")
Typical: TypeAlias = Callable[[Sequence[float]], float]
"""Statistic that represents repeated times of the same operation."""

_NEAR: Final = 2.0
"""Octaves beyond the last measured size for which its ratio is used, unless held-out sizes support it further."""
FEWEST: Final = 4
"""Fewest measured shapes or sizes with which a fit is tested on those left out."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Ratio of measured to modelled times by size in bytes, interpolated in logarithms.

    Attributes:
        sizes: base-2 logarithms of bytes, increasing.
        ratios: natural logarithms of measured over model.
        holds: whether the ratio at either end is used for all sizes beyond it, or only near it.
    """

    sizes: tuple[float, ...]
    ratios: tuple[float, ...]
    holds: bool

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], *, holds: bool, octaves: float) -> Correction:
        """From pairs of bytes and ratio: the medians within bins of ``octaves``; 0 keeps every size."""
        bins: dict[float, list[tuple[float, float]]] = {}
        for size, ratio in pairs:
            place = math.log2(max(size, 1.0))
            bins.setdefault(round(place / octaves) if octaves else place, []).append((place, math.log(ratio)))
        nodes = sorted(
            (statistics.median(x for x, _ in items), statistics.median(y for _, y in items)) for items in bins.values()
        )
        return cls(tuple(x for x, _ in nodes), tuple(y for _, y in nodes), holds)

    def at(self, size: float) -> float:
        """Return measured over modelled time for ``size`` bytes."""
        place = math.log2(max(size, 1.0))
        if place <= self.sizes[0]:
            return math.exp(self._beyond(self.ratios[0], self.sizes[0] - place))
        if place >= self.sizes[-1]:
            return math.exp(self._beyond(self.ratios[-1], place - self.sizes[-1]))
        after = next(index for index, known in enumerate(self.sizes) if known > place)
        low, high = self.sizes[after - 1], self.sizes[after]
        share = (place - low) / (high - low)
        return math.exp((1 - share) * self.ratios[after - 1] + share * self.ratios[after])

    def _beyond(self, ratio: float, octaves: float) -> float:
        return ratio if self.holds else ratio * min(1.0, max(0.0, 2.0 - octaves / _NEAR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Errors of the base and of a fit, on the same held-out measurements."""

    before: dict[str, Any]
    after: dict[str, Any]

    @classmethod
    def of(cls, measured: Sequence[float], base: Sequence[float], fitted: Sequence[float]) -> Trial:
        """From measured and predicted times."""
        return cls(before=error_of(measured, base), after=error_of(measured, fitted))

    @property
    def better(self) -> bool:
        """Whether the fit has the smaller median error.

        Mean and 90th percentile do not count. The error of a prediction that is too low is at most 1, and that of one
        that is too high has no limit, so that both are least for a base that predicts next to nothing.
        """
        return bool(self.after["rows"] and self.after["median"] < self.before["median"])


def repeated(samples: Sequence[tuple[T, Sequence[float]]], base: Callable[[T], float], typical: Typical) -> Trial:
    """Compare the base with a fit to every other repetition, on the held-out repetitions."""
    pairs = [(what, typical(times[::2]), typical(times[1::2])) for what, times in samples if times[1:]]
    return Trial.of(
        [held for _, _, held in pairs], [base(what) for what, _, _ in pairs], [known for _, known, _ in pairs]
    )


def left_out(
    samples: Sequence[tuple[T, float]],
    base: Callable[[T], float],
    fit: Callable[[list[tuple[T, float]]], Callable[[T], float]],
) -> Trial:
    """Leave out each shape or size in turn, and predict it by a fit to all others."""
    if len(samples) < FEWEST:
        return Trial.of([], [], [])
    fitted = [fit([*samples[:index], *samples[index + 1 :]])(what) for index, (what, _) in enumerate(samples)]
    return Trial.of([seconds for _, seconds in samples], [base(what) for what, _ in samples], fitted)
