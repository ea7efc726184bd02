"""Units of the plan language: bytes, seconds and fractions, read and printed; and counts with their nouns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Literal

Dimension = Literal["bytes", "seconds", "fraction", "number"]

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
TIB: Final = 2**40

UNITS: Final[dict[str, tuple[Dimension, float]]] = {
    "B": ("bytes", 1),
    "KiB": ("bytes", KIB),
    "MiB": ("bytes", MIB),
    "GiB": ("bytes", GIB),
    "TiB": ("bytes", TIB),
    "KB": ("bytes", 10**3),
    "MB": ("bytes", 10**6),
    "GB": ("bytes", 10**9),
    "TB": ("bytes", 10**12),
    "us": ("seconds", 1e-6),
    "ms": ("seconds", 1e-3),
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "%": ("fraction", 0.01),
}
"""Unit name to its dimension and its size in that dimension's base unit (byte, second, one)."""


BYTES: Final = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
SECONDS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def unit_of(value: float, units: Sequence[tuple[str, float]], rounded: str) -> tuple[str, float]:
    """Return the largest unit in which a value has a whole digit, and its size.

    Args:
        value: in the dimension's base unit.
        units: of the dimension with their sizes, largest first.
        rounded: format in which the value will be written: what it rounds up to a unit is written in that unit.
    """
    for (unit, size), (_, below) in itertools.pairwise(units):
        if float(f"{abs(value) / below:{rounded}}") >= round(size / below):
            return unit, size
    return units[-1]


def format_bytes(count: float) -> str:
    """Format bytes in the largest binary unit that keeps at least one whole digit: ``72GiB``, ``1.5MiB``."""
    unit, size = unit_of(count, BYTES, ".6g")
    return f"{_plain(count / size)}{unit}"


def format_seconds(duration: float) -> str:
    """Format a duration in the largest of s, ms and us that keeps at least one whole digit: ``1.25s``, ``340us``."""
    unit, size = unit_of(duration, SECONDS, ".6g")
    return f"{_plain(duration / size)}{unit}"


def format_fraction(fraction: float) -> str:
    """The fraction as a percentage: ``10%``."""
    return f"{_plain(fraction * 100)}%"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: ``1 hole``, ``1,024 ranks``, ``2 micro batches``."""
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural}"


_WRITTEN_IN: Final[dict[Dimension, tuple[str, ...]]] = {
    "bytes": ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB", "B"),
    "seconds": ("s", "ms", "us"),
    "fraction": ("%",),
}
"""Units in the order in which they are tried; the last takes what no other does."""

_MOST_DIGITS: Final = 6
"""Most digits of bytes in a unit other than the byte."""


def format_exactly(value: float, dimension: Dimension) -> str:
    """Format a value with all its digits, so that a plan in which it is written means the same value."""
    from decimal import Decimal  # takes milliseconds

    units = _WRITTEN_IN.get(dimension, ("",))
    number = Decimal(repr(value))
    text = ""
    for unit in units:
        size = UNITS[unit][1] if unit else 1
        text = f"{(number / Decimal(repr(size))).normalize():f}"
        short = dimension != "bytes" or sum(map(str.isdigit, text)) <= _MOST_DIGITS
        if unit == units[-1] or (abs(value) >= size and short):
            break
    return f"{text}{unit}"


def _plain(value: float) -> str:
    return f"{value:.6g}"
