"""Tables of measurements, interpolated between the nearest in logarithmic space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Measured points, and at each the logarithm of measured time over that of a formula.

    The interpolated quantity is that ratio, which varies little between neighbours, and not the time.

    Attributes:
        points: base-2 logarithms of the coordinates.
        ratios: natural logarithm of measured over formula at each point.
        reach: how far, in octaves, the nearest point may be.
        columns: the coordinates of all points, dim by dim.
    """

    points: tuple[tuple[float, ...], ...]
    ratios: tuple[float, ...]
    reach: float
    columns: tuple[tuple[float, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Transpose the points."""
        object.__setattr__(self, "columns", tuple(zip(*self.points, strict=True)))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Table:
        """The table that a profile's JSON holds.

        Raises:
            KeyError: a field is missing.
            ValueError: points and ratios differ in number, or points in their dims.
        """
        points = tuple(tuple(float(value) for value in point) for point in document["points"])
        ratios = tuple(float(value) for value in document["ratios"])
        if len(points) != len(ratios) or len({len(point) for point in points}) > 1:
            raise ValueError("a table's points and ratios do not match")
        return cls(points=points, ratios=ratios, reach=float(document["reach"]))

    def distance(self, point: Sequence[float]) -> float:
        """Octaves to the nearest measurement; infinite where there is none."""
        return min((math.dist(point, measured) for measured in self.points), default=math.inf)

    def lookup(self, point: Sequence[float]) -> float | None:
        """The ratio at ``point``; None where no measurement is within reach.

        Neighbours weigh ``exp(-(distance / scale)²)`` with the distance of the nearest as scale, so that a measured
        point answers with its own measurement.
        """
        if not self.points:
            return None
        squares = [0.0] * len(self.points)
        for place, measured in zip(point, self.columns, strict=True):
            squares = [square + (place - one) ** 2 for square, one in zip(squares, measured, strict=True)]
        least = min(squares)
        if least > self.reach**2:
            return None
        scale = max(least, 1e-4)
        weights = [math.exp(-(square - least) / scale) for square in squares]
        total = sum(weights)
        return sum(weight * ratio for weight, ratio in zip(weights, self.ratios, strict=True)) / total
