"""Layouts of a tensor on a mesh axis, as styles and placements name them."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Calls, Treatment, option
from legoai.specs.directives.kinds import Choice, Either, Integer, ListOf


class Replicated(Treatment):
    """The whole tensor on every rank of the axis."""

    name: ClassVar[str] = "replicate"


class Sharded(Treatment):
    """The tensor cut along one dim, a piece on each rank of the axis."""

    name: ClassVar[str] = "shard"

    dim: int = option(Integer(), doc="The tensor dim that is cut; negative counts from the last.")


class Partial(Treatment):
    """Every rank holds a summand of the tensor (`Partial`)."""

    name: ClassVar[str] = "partial"


Layout = Replicated | Sharded | Partial
LAYOUT = Calls((Replicated, Sharded, Partial))
LAYOUTS = Either((LAYOUT, ListOf(Either((LAYOUT, Choice(("none",)))))))
"""One layout for the first tensor, or a list with one for each, `none` where the value is no tensor to convert."""
