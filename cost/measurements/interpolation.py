"""Interpolation of times between measured sizes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds at measured sizes, interpolated in logarithms.

    Above the largest size, time grows in proportion. Below the smallest it stays constant, as latency dominates.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def read(cls, points: Sequence[Sequence[float]]) -> Measured | None:
        """Read pairs of bytes and seconds; None for no pairs.

        Raises:
            ValueError: sizes that do not increase, or a time that is not positive.
        """
        if not points:
            return None
        sizes, seconds = (tuple(map(float, column)) for column in zip(*points, strict=True))
        if min(seconds) <= 0 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError("measured sizes increase and times are positive")
        return cls(sizes=sizes, seconds=seconds)

    def at(self, bytes: float, formula: Callable[[float], float] | None = None) -> float | None:
        """Return the seconds of ``bytes`` bytes; None where no measured size is near enough.

        That is more than four octaves above the largest or between two sizes that are so far apart, and, of one or two
        sizes, more than an octave beyond them. Between two sizes the ratio to ``formula`` is interpolated where there
        is one, since the slope of time changes where bandwidth begins to dominate latency; otherwise time itself.
        """
        if bytes > self.sizes[-1]:
            reach = 16 if len(self.sizes) > 2 else 2
            return self.seconds[-1] * bytes / self.sizes[-1] if bytes <= reach * self.sizes[-1] else None
        after = bisect.bisect_left(self.sizes, bytes)
        if after == 0:
            return self.seconds[0] if len(self.sizes) > 2 or 2 * bytes >= self.sizes[0] else None
        low, high = self.sizes[after - 1], self.sizes[after]
        if high > 16 * low and bytes != high:
            return None
        share = math.log(bytes / low) / math.log(high / low)
        if formula is None:
            first, second = (math.log(self.seconds[index]) for index in (after - 1, after))
            return math.exp(first + share * (second - first))
        first, second = (math.log(self.seconds[index] / formula(self.sizes[index])) for index in (after - 1, after))
        return formula(bytes) * math.exp(first + share * (second - first))
