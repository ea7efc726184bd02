"""Containers of repeated blocks in a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """A container of repeated blocks, such as the layers of a transformer."""

    path: str
    """Path of the container."""
    names: tuple[str, ...]
    """Names of the blocks inside it, in order: block i is the module `path.names[i]`."""
    groups: tuple[tuple[int, ...], ...]
    """Indices of blocks that are equal in class, shapes, attributes and flow; one group when all are alike."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the blocks, in order."""
        return _paths_below(self.path, self.names)


@lru_cache(maxsize=64)  # the lists of a few models, each of which is queried very often
def _paths_below(path: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{path}.{name}" if path else name for name in names)
