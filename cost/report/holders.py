"""Modules that hold the active memory at its peak, and the host memory beside it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legoai.cost import words
from legoai.cost.memory.host import HostMemory
from legoai.cost.memory.storages import LiveStorage, MemoryReport
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.timing.breakdown import pattern_of
from legoai.cost.trace.records import Category
from legoai.specs.units import counted


@dataclass(frozen=True, slots=True)
class Holder:
    """Storages at the peak of equal modules, which the same lines of a plan decide.

    Attributes:
        pattern: the modules' path, with numbers written as `*`.
        modules: their number.
        bytes: of all of them.
        by_category: the bytes of each category, largest first.
        causes: of each category, in the same order.
    """

    pattern: str
    modules: int
    bytes: int
    by_category: Mapping[Category, int]
    causes: tuple[Cause, ...]


def holders(memory: MemoryReport, causes: Causes) -> tuple[Holder, ...]:
    """Return the modules that hold the peak of ``memory``, those with the most bytes first."""
    categories: defaultdict[str, set[Category]] = defaultdict(set)
    for storage in memory.live:
        categories[pattern_of(storage.module)].add(storage.category)
    of_modules: dict[str, dict[Category, Cause]] = {}
    found: defaultdict[tuple[str, frozenset[Any]], list[LiveStorage]] = defaultdict(list)
    for storage in memory.live:
        module, pattern = storage.module, pattern_of(storage.module)
        if module not in of_modules:
            of_modules[module] = {category: causes.of_memory(category, module) for category in categories[pattern]}
        found[pattern, frozenset(of_modules[module].items())].append(storage)
    rows = (_holder(pattern, storages, of_modules[storages[0].module]) for (pattern, _), storages in found.items())
    return tuple(sorted(rows, key=lambda holder: (-holder.bytes, holder.pattern)))


def causes_of_categories(memory: MemoryReport, causes: Causes) -> dict[Category, dict[Cause, int]]:
    """Return the bytes of each category at the peak that each line causes, those with the most first."""
    found: defaultdict[Category, Counter[Cause]] = defaultdict(Counter)
    for holder in holders(memory, causes):
        for (category, size), cause in zip(holder.by_category.items(), holder.causes, strict=True):
            found[category][cause] += size
    return {category: dict(found[category].most_common()) for category in memory.by_category}


def _holder(pattern: str, storages: list[LiveStorage], causes: Mapping[Category, Cause]) -> Holder:
    categories: Counter[Category] = Counter()
    for storage in storages:
        categories[storage.category] += storage.bytes
    largest = dict(categories.most_common())
    return Holder(
        pattern=pattern,
        modules=len({storage.module for storage in storages}),
        bytes=sum(categories.values()),
        by_category=largest,
        causes=tuple(causes[category] for category in largest),
    )


def offloaded(memory: HostMemory) -> tuple[str, str]:
    """Return the host memory of a rank, and that of all ranks of a host, in words."""
    rank = memory.of_rank
    parts = {"parameters": rank.parameters, "gradients": rank.gradients, "optimizer state": rank.optimizer}
    held = ", ".join(f"{name} {words.size(found)}" for name, found in parts.items() if found)
    of_host = f"{words.size(memory.total)} of the {counted(memory.ranks, 'rank')} of a host"
    return words.size(rank.total), f"of each rank: {held}; {of_host}"
