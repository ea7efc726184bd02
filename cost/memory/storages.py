"""Active memory of a trace: its peak in a step, by contents, module and phase."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from legoai.cost.memory.effects import MemoryEffects, bytes_of
from legoai.cost.memory.following import Followed, change
from legoai.cost.memory.makers import makers
from legoai.cost.trace.numbers import KINDS, NONE
from legoai.cost.trace.records import Allocate, Categorise, Category, Free, Phase, Resize
from legoai.cost.trace.segments import Instance, Item, slot_inside
from legoai.cost.trace.trace import Trace

_STORAGE: Final = KINDS.index("storage")


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage at the peak, in bytes as the allocator rounds them; ``op`` is the operator that allocated it."""

    storage: int
    bytes: int
    category: Category
    module: str
    phase: Phase
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The active memory of one step of one rank, in bytes.

    Every storage counts as the block that CUDA's allocator gives it, a multiple of 512 bytes. Its category is the one
    that it has in the end: a buffer that becomes a gradient counts as a gradient from its allocation on.

    Attributes:
        peak: maximum of active bytes.
        peak_record: index of the record of the trace at which the peak is first reached.
        peak_phase: of that record.
        start: active bytes when the step begins.
        by_category: of the peak.
        by_module: of the peak, by the module that each storage is of, or that allocated it; "" for none.
        by_phase: maximum of active bytes within each phase.
        live: the storages at the peak, largest first.

    Without tables, `by_module` and `live` are empty.
    """

    peak: int
    peak_record: int
    peak_phase: Phase
    start: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    by_phase: Mapping[Phase, int]
    live: tuple[LiveStorage, ...]


def memory(trace: Trace, *, step: int = -1, tables: bool = True) -> MemoryReport:
    """Return the active memory of one step of a trace.

    Args:
        trace: of one rank, from the setup on.
        step: index of the step; the last one represents all further steps.
        tables: whether to list each storage at the peak, and the bytes of modules.

    Raises:
        ValueError: the trace has no such step, or uses a storage that is not alive.
    """
    found = trace.steps
    if not -len(found) <= step < len(found):
        raise ValueError(f"the trace has {len(found)} steps, and no step {step}")
    span = found[step]
    followed = trace.summary(Followed)
    seen = followed.seen
    first, stop = (bisect_left(seen, index, key=attrgetter("start")) for index in (span.start, span.stop - 1))
    start = peak = seen[first].behind
    at, within = first, 0
    peak_phase: Phase = "other"
    by_phase: dict[Phase, int] = {}
    for place in range(first, stop):
        one = seen[place]
        effect = one.effect
        if effect is not None:
            for name, most in effect.by_phase:
                by_phase[name] = max(by_phase.get(name, 0), one.before + most)
            if one.before + effect.most > peak:
                peak, at, within, peak_phase = one.before + effect.most, place, effect.index, effect.most_phase
        elif isinstance(one.item, Allocate | Free | Resize):
            if one.behind > by_phase.get(one.phase, -1):
                by_phase[one.phase] = one.behind
            if one.behind > peak:
                peak, at, within, peak_phase = one.behind, place, 0, one.phase
    alive = _alive(trace.items, followed, at, within)
    held, named = _recorded_categories(trace, alive)
    live = _live(trace, alive, held, named) if tables else ()
    categories: Counter[Category] = Counter()
    modules: Counter[str] = Counter()
    for storage in live:
        categories[storage.category] += storage.bytes
        modules[storage.module] += storage.bytes
    if not tables:
        for number, kept in alive.items():
            categories[held.get(number, kept.made.category)] += kept.bytes
    return MemoryReport(
        peak=peak,
        peak_record=seen[at].start + within,
        peak_phase=peak_phase,
        start=start,
        by_category=dict(categories.most_common()),
        by_module=dict(modules.most_common()),
        by_phase=by_phase,
        live=live,
    )


class _Alive(NamedTuple):
    """A storage at the peak: its allocation, its bytes, and the instance that allocated it, if any, with its slot."""

    made: Allocate
    bytes: int
    by: Instance | None
    slot: int


def _alive(items: Sequence[Item], followed: Followed, at: int, within: int) -> dict[int, _Alive]:
    """Return the storages with bytes that are alive after a record.

    Args:
        items: of the trace.
        followed: the walk of these items.
        at: index of the item in the walk.
        within: the record's index in an instance.
    """
    one, held = followed.seen[at], followed.held_before(at)
    made: dict[int, tuple[Allocate, Instance | None, int]] = {}
    by = one.item if isinstance(one.item, Instance) else None
    records = ((one.item, None),) if by is None else zip(by.segment.records, by.segment.slots, strict=True)
    for record, slot in itertools.islice(records, within + 1):
        if isinstance(record, Allocate | Free | Resize):
            number = record.storage if by is None or slot is None else by.number(slot)
            change(held, record, number)
            if isinstance(record, Allocate):
                made[number] = record, by, NONE if slot is None else slot
    numbers = sorted(number for number, block in held.items() if bytes_of(block) and number not in made)
    wanted = frozenset(numbers)
    for item in itertools.islice(items, one.place):
        if type(item) is Instance:
            for number in _made_by(item, numbers, wanted):
                slot = slot_inside(_STORAGE, item.own[_STORAGE].index(number))
                allocated, _ = item.segment.summary(MemoryEffects).survivors.get(slot, (None, 0))
                if allocated is not None:
                    made[number] = allocated, item, slot
        elif isinstance(item, Allocate) and item.storage in wanted:
            made[item.storage] = item, None, NONE
    found = {}
    for number, block in held.items():
        if size := bytes_of(block):
            record, by, slot = made[number]
            found[number] = _Alive(record, size, by, slot)
    return found


def _made_by(item: Instance, numbers: Sequence[int], wanted: AbstractSet[int]) -> Sequence[int]:
    """Return those of some storages that an instance allocates.

    Args:
        item: the instance.
        numbers: of the storages, ascending.
        wanted: the same numbers as a set.
    """
    own = item.own[_STORAGE]
    if isinstance(own, range) and own.step == 1:  # two bisections suffice for most instances, which allocate none
        first = bisect_left(numbers, own.start)
        return numbers[first : bisect_left(numbers, own.stop, first)]
    return [number for number in own if number in wanted]


def _recorded_categories(trace: Trace, alive: Mapping[int, _Alive]) -> tuple[dict[int, Category], dict[int, str]]:
    """Return the final categories of storages, and their modules, as far as records state them.

    A storage of several modules, such as one of a unit's gradients, is that of the module that holds them all.
    """
    held: dict[int, Category] = {}
    modules: dict[int, str] = {}

    def note(number: int, category: Category, module: str) -> None:
        held[number] = category
        if module:
            modules[number] = _common(modules[number], module) if number in modules else module

    numbers = sorted(alive)
    for item in trace.items:
        if type(item) is Instance:
            effects = item.segment.summary(MemoryEffects)
            if not effects.categories or not (
                _made_by(item, numbers, alive.keys()) or not alive.keys().isdisjoint(effects.categorised.numbers(item))
            ):
                continue
            for record, slot in effects.categories:
                number = item.number(slot)
                if number in alive:
                    note(number, record.category, item.path(record.module) if record.module else "")
        elif isinstance(item, Categorise) and item.storage in alive:
            note(item.storage, item.category, item.module)
    return held, modules


def _common(path: str, other: str) -> str:
    """Return the module that holds two modules."""
    if path == other:
        return path
    pairs = zip(path.split("."), other.split("."), strict=False)
    return ".".join(name for name, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _live(
    trace: Trace, alive: Mapping[int, _Alive], held: Mapping[int, Category], modules: Mapping[int, str]
) -> tuple[LiveStorage, ...]:
    """Return the storages at the peak, largest first, with their final categories."""
    translation = trace.translation
    operators = makers(trace, [(number, one.by, one.slot) for number, one in alive.items() if one.by is not None])
    found = [
        LiveStorage(
            storage=number,
            bytes=one.bytes,
            category=held.get(number, one.made.category),
            module=path if translation is None else translation.path(path),
            phase=one.made.phase,
            op=operators.get(number, ""),
        )
        for number, one in alive.items()
        for path in (modules[number] if number in modules else _maker(one),)
    ]
    return tuple(sorted(found, key=lambda item: (-item.bytes, item.storage)))


def _maker(one: _Alive) -> str:
    """Return the module that allocated a storage."""
    return one.made.module if one.by is None else one.by.path(one.made.module)
