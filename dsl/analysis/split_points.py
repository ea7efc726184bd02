"""Split points of a pipeline: the modules with which a stage can begin, and the modules of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from legoai.dsl.diagnostics.suggestion import closest

if TYPE_CHECKING:
    from legoai.specs.models.manifest import Manifest


class SplitPoints:
    """Where a plan cuts the model, looked up once for the rules about it."""

    def __init__(self, manifest: Manifest) -> None:
        containers = {""}
        for item in manifest.block_lists:
            path = item.path
            containers.add(path)
            while path:
                path = path.rpartition(".")[0]
                containers.add(path)
        self.starts = tuple(
            path for path in manifest.modules if path not in containers and path.rpartition(".")[0] in containers
        )
        """Modules that a stage can begin with, in the model's order: blocks, and those beside the lists of blocks."""
        self.position = {path: index for index, path in enumerate(self.starts)}
        lists = {item.path for item in manifest.block_lists}
        self.blocks = tuple(path for path in self.starts if path.rpartition(".")[0] in lists)

    def even(self, stages: int) -> tuple[str, ...]:
        """The split points that give every stage the same number of blocks, or one more.

        The first and the last stage, which have the embedding and the output layer besides, are the last to get one
        more; of the others the later ones get it first, since fewer micro batches are under way there.
        """
        least, more = divmod(len(self.blocks), stages)
        order = [*range(stages - 2, 0, -1), 0, stages - 1]
        larger = set(order[:more])
        points, first = [], 0
        for stage in range(stages - 1):
            first += least + (stage in larger)
            points.append(self.blocks[first])
        return tuple(points)

    def stages(self, split: str | Sequence[str], stages: int) -> tuple[tuple[str, ...], ...]:
        """The modules of each stage: those from its split point to before the next one.

        Args:
            split: `even`, or the first module of each stage but the first.
            stages: their number; at most that of blocks where the split is even.
        """
        points = self.even(stages) if isinstance(split, str) else split
        edges = [0, *(self.position[point] for point in points), len(self.starts)]
        return tuple(self.starts[first:last] for first, last in pairwise(edges))

    def holder(self, path: str) -> str | None:
        """The module that a stage can begin with and that is or holds ``path``; None for what is around them."""
        while path and path not in self.position:
            path = path.rpartition(".")[0]
        return path or None

    def nearest(self, path: str) -> str | None:
        """The module that holds ``path`` and that a stage can begin with; failing that, one whose name is alike."""
        above = path
        while above:
            if above in self.position:
                return above
            above = above.rpartition(".")[0]
        inside = next((start for start in self.starts if start.startswith(f"{path}.")), None)
        return inside or closest(path, self.starts)
