"""Repeated blocks of one container of a model, few of which are captured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

REACH: Final = 2
"""Groups of blocks that are captured on each side of the replayed one, if a block refers only to its neighbours: the
first or the last, and one for comparison."""
TAKEN: Final = 2 * REACH + 1
"""Groups of blocks that are captured in that case."""
_LONGEST_PERIOD: Final = 8
"""Most blocks of a group."""


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Consecutive blocks of one container, of which every group equals the next, and some were left out.

    Attributes:
        prefix: of the paths of the blocks, such as `layers.`.
        kept: names in the container of the blocks that are captured.
        names: names of all blocks in the whole model.
        middle: the index of the group of `kept` that is replayed; its neighbours on both sides are equal to it.
        period: blocks of a group: 2 where every second block has another treatment.
        key: name of the run: the container's path, with its bounds where the container has other blocks.
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
        """Return how many groups ``blocks`` blocks make."""
        return blocks // self.period

    @property
    def numbered(self) -> bool:
        """Whether its blocks are named by their indices in the list, so that a longer run has names too."""
        first = self.names[0]
        return first.isdecimal() and self.names == tuple(map(str, range(int(first), int(first) + len(self.names))))

    def names_of(self, depth: int, ahead: int = 0) -> tuple[str, ...]:
        """Return the names of ``depth`` blocks.

        Args:
            depth: the number of blocks.
            ahead: how many more blocks precede them in their list than precede the captured ones.

        Raises:
            ValueError: the blocks are not named by their indices, so that names exist only for the model's own depth;
                or they make no whole groups.
        """
        if depth == len(self.names) and not ahead:
            return self.names
        if not self.numbered:
            raise ValueError(f"the blocks of {self.key} are named {self.names[0]}, {self.names[1]}, …")
        if depth % self.period:
            raise ValueError(f"{depth} blocks of {self.key} make no whole groups of {self.period}")
        first = int(self.names[0]) + ahead
        return tuple(map(str, range(first, first + depth)))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a list, of which every group equals the next.

    Attributes:
        start: index of the first block.
        groups: number of groups; more than are captured.
        period: blocks of a group.
        reach: groups that are captured on each side of the replayed one.
    """

    start: int
    groups: int
    period: int
    reach: int = REACH

    @property
    def stop(self) -> int:
        """Index after the last block."""
        return self.start + self.groups * self.period

    @property
    def kept(self) -> list[int]:
        """Indices of the blocks that are captured."""
        groups = [*range(self.reach + 1), *range(self.groups - self.reach, self.groups)]
        return [self.start + group * self.period + place for group in groups for place in range(self.period)]

    @property
    def middle(self) -> int:
        """Index of the captured group that is replayed."""
        return self.reach

    @property
    def left_out(self) -> int:
        """Number of blocks that are not captured; negative where none can be left out."""
        return (self.groups - 2 * self.reach - 1) * self.period


def runs_of(classes: Sequence[int], ahead: int = 1) -> Iterator[Run]:
    """Yield runs of repeated blocks that do not overlap, in order.

    From each block on, the run with the most blocks to leave out is chosen.

    Args:
        classes: of the blocks of a list; blocks of a class are interchangeable.
        ahead: how many blocks away, at most, a block may refer to another.
    """
    start = 0
    while start < len(classes):
        best: Run | None = None
        for period in range(1, _LONGEST_PERIOD + 1):
            stop = start + period
            while stop < len(classes) and classes[stop] == classes[stop - period]:
                stop += 1
            run = Run(start, (stop - start) // period, period, REACH - 1 + math.ceil(ahead / period))
            if run.left_out > 0 and (best is None or run.left_out > best.left_out):
                best = run
        if best is None:
            start += 1
        else:
            yield best
            start = best.stop
