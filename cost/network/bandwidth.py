"""Bandwidth of a link by message size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legoai.cost.measurements.interpolation import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid:
    """The dissertation's eq. 4.1: ``B(D) = limit / (1 + exp(-steepness · (ln(D + 1) - middle))) + offset``.

    D and the limit are in bytes and bytes per second. The dissertation bounds the offset above by -1 so that B has no
    pole in a time formula; but then B is zero at some D > 0, which is one. Here the offset is 0, so that B is positive.
    """

    limit: float
    steepness: float
    middle: float

    def __post_init__(self) -> None:
        if self.limit <= 0 or self.steepness < 0:
            raise ValueError("a bandwidth is positive and does not fall with size")

    def at(self, bytes: float) -> float:
        """Bytes per second of a message of ``bytes`` bytes."""
        exponent = -self.steepness * (math.log(bytes + 1) - self.middle)
        return self.limit / (1 + math.exp(min(exponent, 60.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """One collective among a number of ranks on one host: its measurements, and the curve fitted to them."""

    sigmoid: Sigmoid
    latency: float
    measured: Measured | None
    derived: str

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> LinkCurve:
        """The curve that a profile's JSON holds.

        Raises:
            KeyError: a field is missing.
            ValueError: a field makes no sense.
        """
        limit, steepness, middle = document["sigmoid"]
        return cls(
            sigmoid=Sigmoid(limit=limit, steepness=steepness, middle=middle),
            latency=float(document["latency"]),
            measured=Measured.read(document.get("points", ())),
            derived=str(document.get("derived", "")),
        )
