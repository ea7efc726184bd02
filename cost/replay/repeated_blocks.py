"""Record of the repeated blocks of one container of a model, a few of which stand for all."""

from __future__ import annotations

import dataclasses
from typing import Final

TAKEN: Final = 5
"""Blocks that are captured: the first and the last, each with one neighbour, and three that are compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Equal blocks of one container, some of which were left out.

    Attributes:
        prefix: of the paths of the blocks, such as `layers.`.
        kept: names in the container of the blocks that are captured.
        names: names of all blocks in the whole model.
        middle: the index in `kept` of the block that is replayed; those before and behind it are equal to it.
    """

    prefix: str
    kept: tuple[str, ...]
    names: tuple[str, ...]
    middle: int

    @property
    def missing(self) -> int:
        """How many blocks were left out."""
        return len(self.names) - len(self.kept)

    def names_of(self, depth: int) -> tuple[str, ...]:
        """Return the names that so many blocks have.

        Raises:
            ValueError: the blocks are not named by their places, so that only the model's own depth has names.
        """
        if depth == len(self.names):
            return self.names
        if self.names != tuple(map(str, range(len(self.names)))):
            raise ValueError(f"the blocks of {self.prefix.rstrip('.')} are named {self.names[0]}, {self.names[1]}, …")
        return tuple(map(str, range(depth)))
