"""Pieces of a model's tensors: each a box of one of them that is also a box of a published tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A box of one of a model's tensors, and its position in a published tensor.

    Attributes:
        name: of the published tensor.
        start: the box's first index in each dim of the model's tensor.
        size: its lengths.
        offset: its first indices in the published tensor, in the order of the model's dims; where it is one shorter
            than `start`, the published tensor lacks the first dim, in which the box has length 1: an expert of several.
        transposed: whether the published tensor has the last two dims in the other order.
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]
    transposed: bool = False

    def region(self, begin: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the position of a part of the box in the published tensor: first index and length of each of its dims.

        Args:
            begin: the part's first indices in the box.
            lengths: the part's lengths.
        """
        lacking = len(self.start) - len(self.offset)
        found = [
            (first + at, length)
            for first, at, length in zip(self.offset, begin[lacking:], lengths[lacking:], strict=True)
        ]
        if self.transposed:
            found[-2:] = found[-1], found[-2]
        return tuple(found)


Pieces = tuple[Piece, ...]
"""The pieces of a model's tensor; together they cover it."""


def whole(name: str, shape: Sequence[int], *, transposed: bool = False, row: int = 0) -> Pieces:
    """A tensor that is one box of a published one, from a row on in the first of the model's dims."""
    box = tuple(shape)
    offset = (row, *(0,) * len(box))[: len(box)]
    return (Piece(name, (0,) * len(box), box, offset, transposed),)


def stacked(names: Sequence[str], shape: Sequence[int], *, row: int = 0, rows: int | None = None) -> Pieces:
    """Return rows of a tensor along whose first dim published tensors are stacked, one for each index.

    Args:
        names: of the published tensors.
        shape: of the model's tensor.
        row: the first of the rows, which are along its second dim.
        rows: their number; all by default.
    """
    _, length, *rest = shape
    length = length if rows is None else rows
    zeros = (0,) * len(rest)
    return tuple(Piece(name, (index, row, *zeros), (1, length, *rest), (0, *zeros)) for index, name in enumerate(names))


def published_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the published tensors that contain these pieces, each just large enough."""
    found: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        ends = tuple(first + length for first, length in piece.region((0,) * len(piece.start), piece.size))
        found[piece.name] = tuple(map(max, zip(found.get(piece.name, ends), ends, strict=True)))
    return found
