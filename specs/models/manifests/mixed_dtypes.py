"""Operators that get tensors of two floating-point dtypes, where a model's parameters are in half precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class MixedDtypes(NamedTuple):
    """An operator that torch does not compute, since some of its tensors are wider than the parameters.

    A unit of `fsdp` or `replicate` casts what its module is called with, and may cast what that returns: then the
    operator gets one dtype.
    """

    module: str
    """Path of the module whose forward calls it."""
    operator: str
    """The torch function, such as `linear`."""
    source: str
    """Where the wider tensor comes from, in words."""
    entered: tuple[str, ...]
    """Paths of the modules that the wider tensor, or what it was computed from, was an argument of."""
    left: tuple[str, ...]
    """Paths of those that returned it."""


def mixed_from(raw: Iterable[Sequence[Any]]) -> tuple[MixedDtypes, ...]:
    """Read the serialised form."""
    return tuple(
        MixedDtypes(module, operator, source, tuple(entered), tuple(left))
        for module, operator, source, entered, left in raw
    )
