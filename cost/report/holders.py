"""Modules that hold the active memory at its peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from legoai.cost.memory.storages import LiveStorage, MemoryReport
from legoai.cost.timing.breakdown import pattern_of
from legoai.cost.trace.records import Category


@dataclass(frozen=True, slots=True)
class Holder:
    """Storages at the peak of equal modules.

    Attributes:
        pattern: the modules' path, with numbers written as `*`.
        first: the path of one of them.
        modules: their number.
        bytes: of all of them.
        by_category: the bytes of each category, largest first.
    """

    pattern: str
    first: str
    modules: int
    bytes: int
    by_category: Mapping[Category, int]


def holders(memory: MemoryReport) -> tuple[Holder, ...]:
    """Return the modules that hold the peak of ``memory``, those with the most bytes first."""
    found: defaultdict[str, list[LiveStorage]] = defaultdict(list)
    for storage in memory.live:
        found[pattern_of(storage.module)].append(storage)
    return tuple(sorted((_holder(*item) for item in found.items()), key=lambda holder: (-holder.bytes, holder.pattern)))


def _holder(pattern: str, storages: list[LiveStorage]) -> Holder:
    categories: Counter[Category] = Counter()
    for storage in storages:
        categories[storage.category] += storage.bytes
    return Holder(
        pattern=pattern,
        first=storages[0].module,
        modules=len({storage.module for storage in storages}),
        bytes=sum(categories.values()),
        by_category=dict(categories.most_common()),
    )
