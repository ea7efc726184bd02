"""Active memory of a trace: its peak in a step, what it holds, and which modules and phases need it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from legoai.cost.memory.allocator import round_block
from legoai.cost.memory.effects import MemoryEffects, effect_of, survive
from legoai.cost.trace.records import Allocate, Categorise, Category, Free, Kernel, Mark, Phase, Resize
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.trace import Trace, length

_TELLING: Final[AbstractSet[type]] = {Allocate, Free, Kernel, Mark, Resize}
"""Records from which the phases of a step and its memory are told."""
_TOLD: Final = 3
"""Rounds from which on some may be left out: the first names what was not made by one like it."""


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


def memory(trace: Trace, *, step: int = -1) -> MemoryReport:
    """Follow the storages of a trace through one step.

    Args:
        trace: of one rank, from the setup on.
        step: which, as an index of the trace's steps; the last is the one that all further steps are like.

    Raises:
        ValueError: the trace has no such step, or names a storage that does not live.
    """
    found = trace.steps
    if not -len(found) <= step < len(found):
        raise ValueError(f"the trace has {len(found)} steps, and no step {step}")
    span = found[step]
    sizes: dict[int, int] = {}
    active = start = peak = 0
    peak_record = span.start
    phase: Phase = "other"
    peak_phase: Phase = phase
    by_phase: dict[Phase, int] = {}
    for index, item in _followed(trace, sizes):
        if isinstance(item, Kernel):
            phase = item.phase
        elif isinstance(item, Mark):
            if index == span.start:
                start = peak = active
            elif index + 1 == span.stop:
                break
        elif isinstance(item, Instance):
            effect = effect_of(item, sizes, phase)
            if index >= span.start:
                for name, most in effect.by_phase:
                    by_phase[name] = max(by_phase.get(name, 0), active + most)
                if active + effect.most > peak:
                    peak, peak_record, peak_phase = active + effect.most, index + effect.index, effect.most_phase
            active += effect.change
            phase = effect.phase
            effect.apply(item, sizes)
        else:
            if isinstance(item, Allocate):
                phase = item.phase
                sizes[item.storage] = size = round_block(item.bytes)
                active += size
            elif isinstance(item, Free):
                active -= _size(sizes, item.storage)
                del sizes[item.storage]
            elif isinstance(item, Resize):
                size = round_block(item.bytes)
                active += size - _size(sizes, item.storage)
                sizes[item.storage] = size
            if index >= span.start:
                if active > by_phase.get(phase, -1):
                    by_phase[phase] = active
                if active > peak:
                    peak, peak_record, peak_phase = active, index, phase
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


def _followed(trace: Trace, sizes: dict[int, int]) -> Iterator[tuple[int, Item]]:
    """Yield what tells of memory, as :meth:`Trace.placed`; of rounds that find what the one before found only one.

    Args:
        trace: of one rank.
        sizes: bytes of the storages that are there, as they are when the next item is asked for.
    """
    rounds = trace.rounds
    if rounds is None or rounds.count < _TOLD:
        yield from trace.placed(_TELLING)
        return
    starts = list(itertools.accumulate(map(length, trace.items), initial=0))

    def part(begin: int, end: int) -> Iterator[tuple[int, Item]]:
        for place in range(begin, end):
            item = trace.items[place]
            if type(item) is Instance or type(item) in _TELLING:
                yield starts[place], item

    yield from part(0, rounds.first)
    before: dict[int, int] = {}
    for done in range(rounds.count):
        moved = rounds.moved(before, sizes, 1) if done >= _TOLD - 1 else None
        if moved is not None:
            for number in moved:
                sizes[number + rounds.shift * (rounds.count - done)] = sizes.pop(number)
            break
        before = dict(sizes)
        begin = rounds.first + done * rounds.length
        yield from part(begin, begin + rounds.length)
    yield from part(rounds.stop, len(trace.items))


def _size(sizes: Mapping[int, int], storage: int) -> int:
    if storage not in sizes:
        raise ValueError(f"storage {storage} is not allocated")
    return sizes[storage]


def _live(trace: Trace, at: int) -> tuple[LiveStorage, ...]:
    """Return the storages behind a record, with what they turn out to hold."""
    alive: dict[int, tuple[Allocate, int, Instance | None]] = {}
    for index, item in trace.placed({Allocate, Free, Resize}):
        if index > at:
            break
        if isinstance(item, Allocate | Free | Resize):
            _survive(item, item.storage, None, alive)
        elif not isinstance(item, Instance):
            continue
        elif index + len(item) <= at + 1:
            survive(item, alive)
        else:
            pairs = zip(item.segment.records, item.segment.slots, strict=True)
            for record, slot in itertools.islice(pairs, at + 1 - index):
                if isinstance(record, Allocate | Free | Resize):
                    _survive(record, item.number(slot), item, alive)
    held: dict[int, Category] = {}
    modules: dict[int, str] = {}
    for _, item in trace.placed({Categorise}):
        if isinstance(item, Instance):
            effects = item.segment.summary(MemoryEffects)
            if alive.keys().isdisjoint(effects.categorised.numbers(item)):
                continue
            for record, slot in effects.categories:
                number = item.number(slot)
                if number in alive:
                    held[number] = record.category
                    if record.module:
                        modules[number] = item.path(record.module)
        elif isinstance(item, Categorise) and item.storage in alive:
            held[item.storage] = item.category
            if item.module:
                modules[item.storage] = item.module
    translation = trace.translation
    found = [
        LiveStorage(
            storage=number,
            bytes=size,
            category=held.get(number, made.category),
            module=path if translation is None else translation.path(path),
            phase=made.phase,
        )
        for number, (made, size, by) in alive.items()
        if size
        for path in (modules.get(number) or (made.module if by is None else by.path(made.module)),)
    ]
    return tuple(sorted(found, key=lambda item: (-item.bytes, item.storage)))


def _survive(
    record: Allocate | Free | Resize,
    number: int,
    by: Instance | None,
    alive: dict[int, tuple[Allocate, int, Instance | None]],
) -> None:
    """Follow which storages are alive through one record, which is by itself or of an instance."""
    if isinstance(record, Allocate):
        alive[number] = record, round_block(record.bytes), by
    elif isinstance(record, Free):
        del alive[number]
    else:
        made, _, maker = alive[number]
        alive[number] = made, round_block(record.bytes), maker


def changes(trace: Trace, *, step: int = -1) -> Iterator[tuple[int, int]]:
    """Yield the bytes that are active when a step begins, and then behind each change of them.

    Args:
        trace: of one rank, from the setup on.
        step: which, as an index of the trace's steps.

    Yields:
        The index of a record of the trace, and bytes.
    """
    span = trace.steps[step]
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
