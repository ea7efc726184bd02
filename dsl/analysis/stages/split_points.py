"""Split points of a pipeline: the modules with which a stage can begin, and the modules of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from legoai.dsl.diagnostics.suggestion import closest

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest


class SplitPoints:
    """Positions at which a plan divides the model, computed once for the rules about it."""

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
        self._holders: dict[str, str | None] = {}
        self._even: dict[tuple[int, float, float], tuple[int, ...]] = {}

    def even(self, stages: int, *, embedding: float = 0.0, loss: float = 0.0) -> tuple[str, ...]:
        """Return the split points that give every stage as many blocks as :meth:`even_counts`."""
        return self.counted(self.even_counts(stages, embedding=embedding, loss=loss))

    def even_counts(self, stages: int, *, embedding: float = 0.0, loss: float = 0.0) -> tuple[int, ...]:
        """Return the numbers of blocks that give every stage the same load, up to one block.

        If loads are equal, the first and the last stage, which have the embedding and the output layer in addition, are
        the last to get one more; among the others the later ones get it first, since fewer micro batches are in flight
        there.

        Args:
            stages: their number, at most that of blocks; each gets at least one.
            embedding: what the first stage computes besides its blocks, in blocks.
            loss: what the last stage computes besides its blocks, in blocks.
        """
        key = stages, embedding, loss
        if key not in self._even:
            self._even[key] = tuple(self._even_counts(stages, embedding, loss))
        return self._even[key]

    def _even_counts(self, stages: int, embedding: float, loss: float) -> list[int]:
        order = [*range(stages - 2, 0, -1), 0, stages - 1] if stages > 1 else [0]
        loads = dict.fromkeys(order, 1.0)
        loads[0] += embedding
        loads[stages - 1] += loss
        counts = [1] * stages
        for _ in range(len(self.blocks) - stages):
            least = min(order, key=loads.__getitem__)  # the first of several
            loads[least] += 1.0
            counts[least] += 1
        return counts

    def counted(self, counts: Sequence[int]) -> tuple[str, ...]:
        """Return the split points that give every stage its number of blocks; the numbers add up to that of blocks."""
        assert sum(counts) == len(self.blocks)
        return tuple(self.blocks[first] for first in list(accumulate(counts))[:-1])

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
        """Return the module with which a stage can begin and that is or contains ``path``; None for modules outside."""
        if path not in self._holders:
            above = path
            while above and above not in self.position:
                above = above.rpartition(".")[0]
            self._holders[path] = above or None
        return self._holders[path]

    def nearest(self, path: str) -> str | None:
        """Return the module that contains ``path`` and with which a stage can begin, or one with a similar name."""
        above = path
        while above:
            if above in self.position:
                return above
            above = above.rpartition(".")[0]
        inside = next((start for start in self.starts if start.startswith(f"{path}.")), None)
        return inside or closest(path, self.starts)
