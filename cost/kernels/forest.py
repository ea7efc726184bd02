"""Random forests, shipped as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Regression trees, one after another in flat arrays.

    A node compares one feature with a threshold and goes left where the feature is not greater; a node whose
    ``feature`` is negative is a leaf. ``left`` and ``right`` are indices into the arrays.

    Attributes:
        names: of the features, in order.
        roots: where each tree begins.
        low: smallest value of each feature in training.
        high: largest.
    """

    names: tuple[str, ...]
    roots: tuple[int, ...]
    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Forest:
        """The forest that a profile's JSON holds.

        Raises:
            KeyError: a field is missing.
            ValueError: arrays of different lengths, or a branch that leads back or out.
        """
        forest = cls(**{name: tuple(document[name]) for name in cls.__slots__})
        nodes = len(forest.feature)
        if any(len(array) != nodes for array in (forest.threshold, forest.left, forest.right, forest.value)):
            raise ValueError("the arrays of a forest have different lengths")
        width = len(forest.names)
        if len(forest.low) != width or len(forest.high) != width or not forest.roots:
            raise ValueError("a forest's features and their ranges differ in number")
        for node, feature in enumerate(forest.feature):
            inside = node < forest.left[node] < nodes and node < forest.right[node] < nodes
            if feature >= width or (feature >= 0 and not inside):
                raise ValueError(f"node {node} of a forest leads nowhere")
        if any(not 0 <= root < nodes for root in forest.roots):
            raise ValueError("a forest's root is outside of its arrays")
        return forest

    def predict(self, point: Sequence[float]) -> float:
        """The mean of the trees' leaves that ``point`` falls into."""
        feature, threshold, left, right = self.feature, self.threshold, self.left, self.right
        total = 0.0
        for root in self.roots:
            node = root
            while feature[node] >= 0:
                node = left[node] if point[feature[node]] <= threshold[node] else right[node]
            total += self.value[node]
        return total / len(self.roots)

    def covers(self, point: Sequence[float], *, margin: float = 0.0) -> bool:
        """Whether every feature of ``point`` lies in the range of training, widened by ``margin`` on both sides."""
        return all(
            low - margin <= value <= high + margin for value, low, high in zip(point, self.low, self.high, strict=True)
        )
