"""Shapes of the tensors that modules take and give, in samples and tokens of a micro batch.

A model is run at two sizes of its tokens; how a length changes from one to the other shows what it is a multiple of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Sizes = tuple[int, int]
"""Samples and tokens of each: the shape of token ids."""


class Length(NamedTuple):
    """Length of a dim: `factor`, times the samples, times the tokens of each, as far as it grows with these."""

    factor: int
    samples: bool = False
    tokens: bool = False

    def of(self, sizes: Sizes) -> int:
        """The number of elements."""
        return self.factor * (sizes[0] if self.samples else 1) * (sizes[1] if self.tokens else 1)

    def __str__(self) -> str:
        named = [name for name, grows in (("batch", self.samples), ("length", self.tokens)) if grows]
        return " · ".join([*([str(self.factor)] if self.factor != 1 or not named else []), *named])


Shape = tuple[Length, ...]


def shape_from(raw: Iterable[tuple[int, bool, bool]] | None) -> Shape | None:
    """Read the serialised form."""
    return None if raw is None else tuple(Length(*item) for item in raw)


SAMPLES, TOKENS = Length(1, samples=True), Length(1, tokens=True)

_GROWTH = ((False, False), (True, False), (False, True), (True, True))


def words(shape: Shape) -> str:
    """A shape as a diagnostic writes it: `[length, batch, 128]`."""
    return f"[{', '.join(map(str, shape))}]"


def sizes_of(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """The shape for some samples and tokens."""
    return tuple(length.of(sizes) for length in shape)


def other_sizes(sizes: Sizes) -> Sizes:
    """Return sizes under which samples, tokens and their product all change, each by a ratio of its own."""
    samples, tokens = sizes
    # Ratios from 4/3 to 3 and 1/2 or 2. Half the tokens fit wherever all do.
    return samples + 1 if samples > 1 else 3, tokens // 2 if tokens % 2 == 0 else 2 * tokens


def compared(first: Sequence[int], second: Sequence[int], sizes: Sizes, others: Sizes) -> Shape | None:
    """Return the shape that a tensor had at two sizes; None where a length is no multiple of samples and tokens.

    Args:
        first: its shape at `sizes`.
        second: its shape at `others`, which are `other_sizes(sizes)`.
        sizes: samples and tokens of the first run.
        others: those of the second.
    """
    if len(first) != len(second):
        return None
    found = []
    for one, other in zip(first, second, strict=True):
        fits = (_multiple(one, sizes, *grows) for grows in _GROWTH)
        length = next((item for item in fits if item is not None and item.of(others) == other), None)
        if length is None:
            return None
        found.append(length)
    return tuple(found)


def guessed(shape: Sequence[int], sizes: Sizes) -> Shape:
    """Return the shape of a tensor that was seen at one size only; a length is that of a dim once, and first there."""
    samples, tokens = sizes
    found: list[Length] = []
    for size in shape:
        if size == samples and SAMPLES not in found:
            found.append(SAMPLES)
        elif size == tokens and TOKENS not in found:
            found.append(TOKENS)
        elif size == samples * tokens and not any(item.samples or item.tokens for item in found):
            found.append(Length(1, samples=True, tokens=True))
        else:
            found.append(Length(size))
    return tuple(found)


def _multiple(size: int, sizes: Sizes, samples: bool, tokens: bool) -> Length | None:
    unit = math.prod(count for count, grows in zip(sizes, (samples, tokens), strict=True) if grows)
    return Length(size // unit, samples=samples, tokens=tokens) if size % unit == 0 else None
