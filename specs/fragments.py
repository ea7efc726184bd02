"""Fragments of the optimizer's state: the parts that leave the device as a whole, and the choice of them by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fragment(NamedTuple):
    """The optimizer's state of a parameter."""

    parameter: str
    bytes: int


def within(fragments: Sequence[Fragment], most: int) -> list[Fragment]:
    """Return fragments of at most so many bytes together, in order; the largest ones that fit are taken first."""
    found = set()
    for fragment in sorted(fragments, key=lambda one: one.bytes, reverse=True):
        if fragment.bytes <= most:
            found.add(fragment)
            most -= fragment.bytes
    return [fragment for fragment in fragments if fragment in found]
