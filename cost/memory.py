"""How much memory do the storages of a trace need, when, and for what?"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from legoai.cost.allocator import round_block
from legoai.cost.composed import Use, items_of, length_of, records_of
from legoai.cost.memory_effects import categories_of, effect_of, survive
from legoai.cost.trace import (
    Allocate,
    Categorise,
    Category,
    Free,
    Kernel,
    Mark,
    Phase,
    Resize,
    Trace,
)

_STEP: Final = "step "


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage at the peak, in bytes as the allocator rounds them."""

    storage: int
    bytes: int
    category: Category
    module: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The active memory of one step of one rank, in bytes.

    Every storage counts as the block that CUDA's allocator gives it, a multiple of 512 bytes. What a storage holds is
    what it turns out to hold in the end: a buffer that becomes a gradient is a gradient all its life.

    Attributes:
        peak: the most that is active at once.
        peak_record: index of the record of the trace at which it is first reached.
        peak_phase: of that record.
        start: what is active when the step begins.
        by_category: of the peak.
        by_module: of the peak, by the module that allocated each storage; "" is none.
        by_phase: the most that is active while a phase runs.
        live: the storages at the peak, largest first.
    """

    peak: int
    peak_record: int
    peak_phase: Phase
    start: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    by_phase: Mapping[Phase, int]
    live: tuple[LiveStorage, ...]


def steps(trace: Trace) -> list[range]:
    """Return the indices of the records of each step, its marks included.

    Raises:
        ValueError: a step has no end.
    """
    begun: dict[str, int] = {}
    found = []
    index = 0
    for item in items_of(trace.records):
        if isinstance(item, Mark):
            if item.name.startswith(_STEP):
                begun[item.name] = index
            elif item.name.removeprefix("end ") in begun:
                found.append(range(begun.pop(item.name.removeprefix("end ")), index + 1))
        index += length_of(item)
    if begun:
        raise ValueError(f"the trace has no end of {', '.join(begun)}")
    return found


def memory(trace: Trace, *, step: int = -1) -> MemoryReport:
    """Follow the storages of a trace through one step.

    Args:
        trace: of one rank, from the setup on.
        step: which, as an index of :func:`steps`; the last is the one that all further steps are like.

    Raises:
        ValueError: the trace has no such step, or names a storage that does not live.
    """
    found = steps(trace)
    if not -len(found) <= step < len(found):
        raise ValueError(f"the trace has {len(found)} steps, and no step {step}")
    span = found[step]
    sizes: dict[int, int] = {}
    active = start = peak = index = 0
    peak_record = span.start
    phase: Phase = "other"
    peak_phase: Phase = phase
    by_phase: dict[Phase, int] = {}
    for item in items_of(trace.records):
        if index == span.start:
            start = peak = active
        elif index == span.stop:
            break
        if isinstance(item, Kernel):
            phase = item.phase
        elif isinstance(item, Use):
            effect = effect_of(item, sizes, phase)
            if index >= span.start:
                for name, most in effect.by_phase:
                    by_phase[name] = max(by_phase.get(name, 0), active + most)
                if active + effect.most > peak:
                    peak, peak_record, peak_phase = active + effect.most, index + effect.place, effect.most_phase
            active += effect.change
            phase = effect.phase
            effect.apply(item, sizes)
            index += len(item.part.records)
            continue
        elif isinstance(item, Allocate | Free | Resize):
            if isinstance(item, Allocate):
                phase = item.phase
            size = 0 if isinstance(item, Free) else round_block(item.bytes)
            active += size - (0 if isinstance(item, Allocate) else _size(sizes, item.storage))
            if isinstance(item, Free):
                del sizes[item.storage]
            else:
                sizes[item.storage] = size
            if index >= span.start:
                by_phase[phase] = max(by_phase.get(phase, 0), active)
                if active > peak:
                    peak, peak_record, peak_phase = active, index, phase
        index += 1
    live = _live(trace, peak_record)
    categories: Counter[Category] = Counter()
    modules: Counter[str] = Counter()
    for storage in live:
        categories[storage.category] += storage.bytes
        modules[storage.module] += storage.bytes
    return MemoryReport(
        peak=peak,
        peak_record=peak_record,
        peak_phase=peak_phase,
        start=start,
        by_category=dict(categories.most_common()),
        by_module=dict(modules.most_common()),
        by_phase=by_phase,
        live=live,
    )


def _size(sizes: Mapping[int, int], storage: int) -> int:
    if storage not in sizes:
        raise ValueError(f"storage {storage} is not allocated")
    return sizes[storage]


def _live(trace: Trace, at: int) -> tuple[LiveStorage, ...]:
    """Return the storages behind a record, with what they turn out to hold."""
    alive: dict[int, tuple[Allocate, int]] = {}
    index = 0
    for item in items_of(trace.records):
        if index > at:
            break
        size = length_of(item)
        if isinstance(item, Use) and index + size <= at + 1:
            survive(item, alive)
        else:
            for record in itertools.islice(records_of([item]), at + 1 - index):
                if isinstance(record, Allocate):
                    alive[record.storage] = record, round_block(record.bytes)
                elif isinstance(record, Free):
                    del alive[record.storage]
                elif isinstance(record, Resize):
                    alive[record.storage] = alive[record.storage][0], round_block(record.bytes)
        index += size
    held: dict[int, Category] = {}
    modules: dict[int, str] = {}
    for item in items_of(trace.records):
        if isinstance(item, Use):
            told = tuple((record, item.number(slot)) for record, slot in categories_of(item.part))
        elif isinstance(item, Categorise):
            told = ((item, item.storage),)
        else:
            continue
        for record, number in told:
            if number in alive:
                held[number] = record.category
                if record.module:
                    modules[number] = record.module
    found = [
        LiveStorage(
            storage=number,
            bytes=size,
            category=held.get(number, made.category),
            module=modules.get(number, made.module),
            phase=made.phase,
        )
        for number, (made, size) in alive.items()
        if size
    ]
    return tuple(sorted(found, key=lambda item: (-item.bytes, item.storage)))


def changes(trace: Trace, *, step: int = -1) -> Iterator[tuple[int, int]]:
    """Yield the bytes that are active when a step begins, and then behind each change of them.

    Args:
        trace: of one rank, from the setup on.
        step: which, as an index of :func:`steps`.

    Yields:
        The index of a record of the trace, and bytes.
    """
    span = steps(trace)[step]
    sizes: dict[int, int] = {}
    active = 0
    for index, record in enumerate(itertools.islice(trace.records, span.stop)):
        if isinstance(record, Allocate | Free | Resize):
            size = 0 if isinstance(record, Free) else round_block(record.bytes)
            active += size - sizes.pop(record.storage, 0)
            sizes[record.storage] = size
        elif index != span.start:
            continue
        if index >= span.start:
            yield index, active
