"""Corrections of a model by what was measured, and their errors on measurements that they did not see."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from legoai.cost.calibration.movement import error_of

T = TypeVar("T")
Typical: TypeAlias = Callable[[Sequence[float]], float]
"""The time that counts, of several of the same."""

_NEAR: Final = 2.0
"""Octaves from the last measured size within which its ratio holds, where nothing shows that it holds beyond."""
FEWEST: Final = 4
"""Shapes or sizes that must have been measured, to see whether those that were not are like them."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What measured times are of a model's, by the size of what moves: the logarithm of the ratio is interpolated.

    Attributes:
        sizes: base-2 logarithms of bytes, increasing.
        ratios: natural logarithms of measured over model.
        holds: whether the ratio at either end holds beyond it, or only near it.
    """

    sizes: tuple[float, ...]
    ratios: tuple[float, ...]
    holds: bool

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], *, holds: bool, octaves: float) -> Correction:
        """The medians of pairs of bytes and ratio, within bins of ``octaves``; 0 keeps every size by itself."""
        bins: dict[float, list[tuple[float, float]]] = {}
        for size, ratio in pairs:
            place = math.log2(max(size, 1.0))
            bins.setdefault(round(place / octaves) if octaves else place, []).append((place, math.log(ratio)))
        nodes = sorted(
            (statistics.median(x for x, _ in items), statistics.median(y for _, y in items)) for items in bins.values()
        )
        return cls(tuple(x for x, _ in nodes), tuple(y for _, y in nodes), holds)

    def at(self, size: float) -> float:
        """Measured over model for ``size`` bytes."""
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
    """Errors of the base and of what was fitted, on the same measurements, none of which was fitted."""

    before: dict[str, Any]
    after: dict[str, Any]

    @classmethod
    def of(cls, measured: Sequence[float], base: Sequence[float], fitted: Sequence[float]) -> Trial:
        """From the times themselves."""
        return cls(before=error_of(measured, base), after=error_of(measured, fitted))

    @property
    def better(self) -> bool:
        """Whether what was fitted is nearer, in the median."""
        return bool(self.after["rows"] and self.after["median"] < self.before["median"])


def repeated(samples: Sequence[tuple[T, Sequence[float]]], base: Callable[[T], float], typical: Typical) -> Trial:
    """Every second of the times of the same, held out: those of the others against the base."""
    pairs = [(what, typical(times[::2]), typical(times[1::2])) for what, times in samples if times[1:]]
    return Trial.of(
        [held for _, _, held in pairs], [base(what) for what, _, _ in pairs], [known for _, known, _ in pairs]
    )


def left_out(
    samples: Sequence[tuple[T, float]],
    base: Callable[[T], float],
    fit: Callable[[list[tuple[T, float]]], Callable[[T], float]],
) -> Trial:
    """Each shape or size held out by turns, and predicted by a fit to all others."""
    if len(samples) < FEWEST:
        return Trial.of([], [], [])
    fitted = [fit([*samples[:index], *samples[index + 1 :]])(what) for index, (what, _) in enumerate(samples)]
    return Trial.of([seconds for _, seconds in samples], [base(what) for what, _ in samples], fitted)
