"""Record of the repeated blocks of one container of a model, a few of which stand for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

TAKEN: Final = 5
"""Groups of blocks that are captured: the first and the last, each with one neighbour, and three that are compared."""
_LONGEST_PERIOD: Final = 8
"""Blocks of a group, at most."""
_MIDDLE: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Neighbouring blocks of one container, of which every group is equal to the next, and some were left out.

    Attributes:
        prefix: of the paths of the blocks, such as `layers.`.
        kept: names in the container of the blocks that are captured.
        names: names of all blocks in the whole model.
        middle: the index of the group of `kept` that is replayed; those before and behind it are equal to it.
        period: blocks of a group: 2 where every second block is treated otherwise.
        key: what the run is called: the container's path, with its bounds where the container has other blocks.
    """

    prefix: str
    kept: tuple[str, ...]
    names: tuple[str, ...]
    middle: int
    period: int
    key: str

    @property
    def missing(self) -> int:
        """How many groups were left out."""
        return self.groups(len(self.names)) - self.groups(len(self.kept))

    def groups(self, blocks: int) -> int:
        """Return how many groups so many blocks make."""
        return blocks // self.period

    @property
    def numbered(self) -> bool:
        """Whether its blocks are named by their places in the run, so that a longer run has names too."""
        return self.names == tuple(map(str, range(len(self.names))))

    def names_of(self, depth: int) -> tuple[str, ...]:
        """Return the names that so many blocks have.

        Raises:
            ValueError: the blocks are not named by their places, so that only the model's own depth has names; or so
                many blocks make no whole groups.
        """
        if depth == len(self.names):
            return self.names
        if not self.numbered:
            raise ValueError(f"the blocks of {self.key} are named {self.names[0]}, {self.names[1]}, …")
        if depth % self.period:
            raise ValueError(f"{depth} blocks of {self.key} make no whole groups of {self.period}")
        return tuple(map(str, range(depth)))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of a list, of which every group is equal to the next.

    Attributes:
        start: index of the first block.
        groups: how many there are; more than are captured.
        period: blocks of a group.
    """

    start: int
    groups: int
    period: int

    @property
    def stop(self) -> int:
        """Index behind the last block."""
        return self.start + self.groups * self.period

    @property
    def kept(self) -> list[int]:
        """Indices of the blocks that are captured."""
        groups = [*range(_MIDDLE + 1), *range(self.groups - (TAKEN - _MIDDLE - 1), self.groups)]
        return [self.start + group * self.period + place for group in groups for place in range(self.period)]

    @property
    def middle(self) -> int:
        """Index of the captured group that is replayed."""
        return _MIDDLE


def runs_of(classes: Sequence[int]) -> Iterator[Run]:
    """Yield runs of repeated blocks, of which no two overlap, in their order.

    From each block on, that is taken of which most blocks can be left out.

    Args:
        classes: of the blocks of a list; blocks of a class are interchangeable.
    """
    start = 0
    while start < len(classes):
        best: Run | None = None
        for period in range(1, _LONGEST_PERIOD + 1):
            stop = start + period
            while stop < len(classes) and classes[stop] == classes[stop - period]:
                stop += 1
            run = Run(start, (stop - start) // period, period)
            if run.groups > TAKEN and (best is None or _left_out(run) > _left_out(best)):
                best = run
        if best is None:
            start += 1
        else:
            yield best
            start = best.stop


def _left_out(run: Run) -> int:
    return (run.groups - TAKEN) * run.period
