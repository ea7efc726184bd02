"""Uses of a linear layer's features by operations that may take a view of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

UsedFeatures = Literal["part", "all", "each"]
"""What an operation uses of a layer's features: a contiguous part of them, all together, as a mean does, or pieces
one by one, as a product of queries and keys does with heads."""


class FeatureUse(NamedTuple):
    """Use of the features of a linear layer by an operation that may take a view of them."""

    step: int
    """Index of the operation."""
    whole: int
    """Index of the step whose result has them as its last dim."""
    used: UsedFeatures
