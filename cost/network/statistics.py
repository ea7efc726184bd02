"""Corrections of a formula's time by measurements: regressions, and stragglers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
FLOOR, CEILING = 0.5, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """The dissertation's eq. 4.11, its fallback 4.12, and the update 4.14.

    ``t_min = β · (1, t, ℓ, P, S, t·S, t·P, ℓ·S)``: t the analytical seconds, ℓ its latency alone, P ranks, S bytes of
    the whole buffer. Eq. 4.11 has two coefficients called β₃; here there are eight. P and S are in units of the
    largest measured, so that the coefficients are of one magnitude. Ordinary least squares would fit the largest
    messages alone, so that rows are weighted by one over their time.

    Eq. 4.12 falls back to t where the fit is negative; here also where it is below half or above twenty times t, since
    a linear fit means nothing there. Outside of the measured P and S, both are held at the nearest measured, and
    messages of less than a 64th of the smallest measured, which are all latency, are left to the formula.
    """

    coefficients: tuple[float, ...]
    ranks: tuple[float, float]
    bytes: tuple[float, float]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Regression:
        """From a profile's JSON.

        Raises:
            KeyError: a field is missing.
            ValueError: not eight coefficients.
        """
        coefficients = tuple(float(value) for value in document["coefficients"])
        if len(coefficients) != 8:
            raise ValueError(f"a regression has eight coefficients, not {len(coefficients)}")
        return cls(coefficients=coefficients, ranks=tuple(document["ranks"]), bytes=tuple(document["bytes"]))

    @classmethod
    def fit(cls, rows: Sequence[tuple[float, float, int, float, float]]) -> Regression:
        """From rows of analytical seconds, latency, ranks, bytes and measured seconds."""
        ranks = (min(row[2] for row in rows), max(row[2] for row in rows))
        sizes = (min(row[3] for row in rows), max(row[3] for row in rows))
        empty = cls(coefficients=(0.0,) * 8, ranks=ranks, bytes=sizes)
        matrix = np.array([empty.features(*row[:4]) for row in rows])
        measured = np.array([row[4] for row in rows])
        # A small ridge towards t alone keeps columns apart that few rows tell apart.
        ridge = np.sqrt(0.05) * np.diag([1e3, 1.0, 1.0, 1e3, 1e3, 0.05, 0.05, 0.05])
        target = np.concatenate([np.ones(len(rows)), ridge @ np.array([0.0, 1, 0, 0, 0, 0, 0, 0])])
        weighted = np.concatenate([matrix / measured[:, None], ridge])
        found = np.linalg.lstsq(weighted, target, rcond=None)[0]
        return cls(coefficients=tuple(float(value) for value in found), ranks=ranks, bytes=sizes)

    def features(self, seconds: float, latency: float, ranks: int, bytes: float) -> tuple[float, ...]:
        """The regression's inputs, P and S within the measured range and in units of its largest."""
        p = min(max(ranks, self.ranks[0]), self.ranks[1]) / self.ranks[1]
        s = min(max(bytes, self.bytes[0]), self.bytes[1]) / self.bytes[1]
        return (1.0, seconds, latency, p, s, seconds * s, seconds * p, latency * s)

    def seconds(self, seconds: float, latency: float, ranks: int, bytes: float) -> float:
        """The least time over the ranks: the fit, within a half and twenty times of the analytical ``seconds``."""
        inputs = self.features(seconds, latency, ranks, bytes)
        fitted = sum(a * b for a, b in zip(self.coefficients, inputs, strict=True))
        return min(max(fitted, FLOOR * seconds), CEILING * seconds)

    @property
    def of_one_size(self) -> bool:
        """Whether all measured messages have one size, so that nothing is known of what smaller ones take."""
        return self.bytes[0] == self.bytes[1]

    def near_one_size(
        self, asked: tuple[float, float], there: tuple[float, float], ranks: int, measured: float | None
    ) -> float:
        """Seconds of a message, where measurements have one size only, which calibrates the formula's rate.

        The formula's latency is kept, and its transfer time is scaled by the error at the measured size. So time grows
        with size, and the rate too; a constant time, or a fit that falls back to the formula below some size, would
        have jumps.

        Args:
            asked: analytical seconds of the message, and its latency.
            there: the same of a message of the measured size.
            ranks: of the group.
            measured: seconds at that size where this group was measured. For others the regression predicts them,
                within a half and twenty times of the formula.
        """
        return at_its_rate(asked, there, self.seconds(*there, ranks, self.bytes[0]) if measured is None else measured)

    def below(self, asked: tuple[float, float], there: tuple[float, float], ranks: int) -> float:
        """Seconds of a message below the measured sizes, of which nothing is known but those of the smallest.

        Args:
            asked: analytical seconds of the message, and its latency.
            there: the same of the smallest message that was measured.
            ranks: of the group.
        """
        return below_measured(asked, there, self.seconds(*there, ranks, self.bytes[0]))

    def updated(self, rows: Sequence[tuple[float, float, int, float, float]], rate: float = 0.1) -> Regression:
        """Eq. 4.14 with observed rows as in :meth:`fit`: a step of ``rate`` down the error of each.

        The dissertation's step ``β - η(β·x - y)`` lacks the input x that makes it a gradient. Here the step is
        ``β - η (β·x - y) x / |x|²``, which at a rate of 1 makes the row exact.
        """
        beta: FloatArray = np.array(self.coefficients)
        for seconds, latency, ranks, size, measured in rows:
            x: FloatArray = np.array(self.features(seconds, latency, ranks, size))
            beta = beta - rate * (beta @ x - measured) * x / (x @ x)
        return Regression(coefficients=tuple(map(float, beta)), ranks=self.ranks, bytes=self.bytes)

    def document(self) -> dict[str, Any]:
        """As :meth:`read` takes it."""
        return {"coefficients": list(self.coefficients), "ranks": list(self.ranks), "bytes": list(self.bytes)}


def at_its_rate(asked: tuple[float, float], there: tuple[float, float], measured: float) -> float:
    """Seconds of a message whose latency is the formula's, and whose rate is wrong as that of a measured one.

    Args:
        asked: analytical seconds of the message, and its latency.
        there: the same of a message of the measured size.
        measured: seconds at that size.
    """
    (seconds, latency), (at_size, fixed) = asked, there
    return latency + (seconds - latency) * max(measured - fixed, 0.0) / (at_size - fixed)


def below_measured(asked: tuple[float, float], there: tuple[float, float], measured: float) -> float:
    """As :func:`at_its_rate`, for a message smaller than the smallest measured one: it takes no longer than that."""
    return min(measured, at_its_rate(asked, there, measured))


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The dissertation's eq. 4.13: the 75th percentile over the least time, ``1 + intercept + slope · P · ln S``.

    Never below 1, and P and S are held at the largest measured.
    """

    intercept: float
    slope: float
    ranks: float
    bytes: float

    @classmethod
    def read(cls, document: Mapping[str, float]) -> Straggler:
        """From a profile's JSON.

        Raises:
            KeyError: a field is missing.
        """
        return cls(**{name: float(document[name]) for name in cls.__slots__})

    @classmethod
    def fit(cls, rows: Sequence[tuple[int, float, float]]) -> Straggler:
        """From rows of ranks, bytes and the measured ratio, by the median of residuals (least absolute deviation)."""
        x = np.array([ranks * math.log(size) for ranks, size, _ in rows])
        y = np.array([ratio - 1 for *_, ratio in rows])
        weights = np.ones(len(rows))
        beta = np.zeros(2)
        for _ in range(50):  # iteratively reweighted least squares
            scaled = np.stack([weights, weights * x / x.max()], axis=1)
            beta = np.linalg.lstsq(scaled, weights * y, rcond=None)[0]
            weights = 1 / np.sqrt(np.maximum(np.abs(y - beta[0] - beta[1] * x / x.max()), 1e-3))
        return cls(
            intercept=float(beta[0]),
            slope=float(beta[1] / x.max()),
            ranks=float(max(row[0] for row in rows)),
            bytes=float(max(row[1] for row in rows)),
        )

    def ratio(self, ranks: int, bytes: float) -> float:
        """The 75th percentile over the least time."""
        size = math.log(max(2.0, min(bytes, self.bytes)))
        return max(1.0, 1.0 + self.intercept + self.slope * min(ranks, self.ranks) * size)
