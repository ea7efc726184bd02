"""Every split of blocks into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator


def splits(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every contiguous split, as the numbers of blocks of the stages."""
    if stages == 1:
        yield (blocks,)
        return
    for first in range(1, blocks - stages + 2):
        for rest in splits(blocks - first, stages - 1):
            yield (first, *rest)
