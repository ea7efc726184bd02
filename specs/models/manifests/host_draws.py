"""Random numbers that a model's forward draws on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class HostDraws(NamedTuple):
    """Draws of the generators of Python, NumPy and torch's host in forward, by which it may decide what it calls."""

    generators: tuple[str, ...]
    """Whose numbers it draws: `random`, `numpy.random` or `torch`."""
    decides: str
    """The first parameter whose use depends on the numbers; empty where none was found."""


def draws_from(raw: Sequence[Any] | None) -> HostDraws | None:
    """Read the serialised form; None is that of a forward that draws none."""
    return None if raw is None else HostDraws(tuple(raw[0]), raw[1])
