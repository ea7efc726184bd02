"""How much memory do the storages of a trace need, when, and for what?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from legoai.cost.allocator import round_block
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
        curve: (index of a record, bytes active behind it), one for each change.
        live: the storages at the peak, largest first.
    """

    peak: int
    peak_record: int
    peak_phase: Phase
    start: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    by_phase: Mapping[Phase, int]
    curve: tuple[tuple[int, int], ...]
    live: tuple[LiveStorage, ...]


def steps(trace: Trace) -> list[range]:
    """Return the indices of the records of each step, its marks included.

    Raises:
        ValueError: a step has no end.
    """
    begun: dict[str, int] = {}
    found = []
    for index, record in enumerate(trace.records):
        if isinstance(record, Mark):
            if record.name.startswith(_STEP):
                begun[record.name] = index
            elif record.name.removeprefix("end ") in begun:
                found.append(range(begun.pop(record.name.removeprefix("end ")), index + 1))
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
    active = start = peak = 0
    peak_record = span.start
    phase: Phase = "other"
    peak_phase: Phase = phase
    by_phase: dict[Phase, int] = {}
    curve: list[tuple[int, int]] = []
    for index, record in enumerate(trace.records[: span.stop]):
        if index == span.start:
            start = peak = active
            curve.append((index, active))
        if isinstance(record, Kernel):
            phase = record.phase
            continue
        if isinstance(record, Allocate):
            phase = record.phase
            sizes[record.storage] = size = round_block(record.bytes)
            active += size
        elif isinstance(record, Free):
            active -= _size(sizes, record.storage)
            del sizes[record.storage]
        elif isinstance(record, Resize):
            size = round_block(record.bytes)
            active += size - _size(sizes, record.storage)
            sizes[record.storage] = size
        else:
            continue
        if index >= span.start:
            curve.append((index, active))
            by_phase[phase] = max(by_phase.get(phase, 0), active)
            if active > peak:
                peak, peak_record, peak_phase = active, index, phase
    live = _live(trace, peak_record)
    categories: Counter[Category] = Counter()
    modules: Counter[str] = Counter()
    for item in live:
        categories[item.category] += item.bytes
        modules[item.module] += item.bytes
    return MemoryReport(
        peak=peak,
        peak_record=peak_record,
        peak_phase=peak_phase,
        start=start,
        by_category=dict(categories.most_common()),
        by_module=dict(modules.most_common()),
        by_phase=by_phase,
        curve=tuple(curve),
        live=live,
    )


def _size(sizes: Mapping[int, int], storage: int) -> int:
    if storage not in sizes:
        raise ValueError(f"storage {storage} is not allocated")
    return sizes[storage]


def _live(trace: Trace, at: int) -> tuple[LiveStorage, ...]:
    """Return the storages behind a record, with what they turn out to hold."""
    alive: dict[int, tuple[Allocate, int]] = {}
    for record in trace.records[: at + 1]:
        if isinstance(record, Allocate):
            alive[record.storage] = record, round_block(record.bytes)
        elif isinstance(record, Free):
            del alive[record.storage]
        elif isinstance(record, Resize):
            alive[record.storage] = alive[record.storage][0], round_block(record.bytes)
    held: dict[int, Category] = {}
    modules: dict[int, str] = {}
    for record in trace.records:
        if isinstance(record, Categorise) and record.storage in alive:
            held[record.storage] = record.category
            if record.module:
                modules[record.storage] = record.module
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
