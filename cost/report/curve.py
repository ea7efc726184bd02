"""Curve of active memory over a step, by category."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from legoai.cost.estimate import RankEstimate
from legoai.cost.timing.intervals import Floats, Intervals
from legoai.cost.timing.timeline import Interval
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import Allocate, Categorise, Category, Copy, Free, Kernel, Record, Resize
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.specs.allocator import round_block

Integers: TypeAlias = NDArray[np.int64]

_CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
_CODE: Final = {category: code for code, category in enumerate(_CATEGORIES)}


@dataclass(frozen=True, slots=True)
class Point:
    """Active bytes by category, from a point in time on, in seconds from the beginning of the step."""

    at: float
    bytes: dict[Category, int]

    @property
    def total(self) -> int:
        """Active bytes of all categories."""
        return sum(self.bytes.values())


def memory_curve(item: RankEstimate, *, points: int = 1200) -> tuple[Point, ...]:
    """Return the curve of a rank, thinned to about ``points`` points, each the maximum of those that it replaces.

    A storage is active from the time at which the stream with most operations reaches the op before which the host
    allocated it, until the time at which it reaches the op before which the host freed it. Its category is its final
    one.
    """
    stream, ends = _busiest_stream(item)
    trace, span, seconds = item.trace, item.span, item.breakdown.seconds
    known: dict[int, _Changes] = {}
    before, step, after = (
        _changes(trace.between(part), stream, known)
        for part in (range(span.start), span, range(span.stop, len(trace.records)))
    )
    changes = _Changes.joined([before, step])
    begin, deltas, categories = len(before.storages), changes.deltas(), changes.categories(after)
    # The time at which the stream reaches each change: the end of the last operation before it.
    times = np.concatenate([[0.0], ends])[np.minimum(step.ops, len(ends))]
    chosen = begin + _peaks(np.cumsum(deltas)[begin:], times * (points / seconds if seconds else 1.0))
    shown = np.concatenate([[begin], chosen + 1, [len(deltas)]])
    sizes = {
        category: np.concatenate([[0], np.cumsum(np.where(categories == code, deltas, 0))])[shown].tolist()
        for code, category in enumerate(_CATEGORIES)
        if code in categories
    }
    moments = [0.0, *times[chosen - begin].tolist(), seconds]
    return tuple(
        Point(at, {category: column[place] for category, column in sizes.items()}) for place, at in enumerate(moments)
    )


def _peaks(totals: Integers, positions: Floats) -> Integers:
    """Return the index of the first maximum of ``totals`` in each unit of ``positions``, which ascend."""
    units = positions.astype(np.int64)
    first = np.flatnonzero(np.diff(units, prepend=-1))
    if not len(first):
        return first
    highest = np.repeat(np.maximum.reduceat(totals, first), np.diff(first, append=len(totals)))
    found = np.flatnonzero(totals == highest)
    return found[np.flatnonzero(np.diff(units[found], prepend=-1))]


def _busiest_stream(item: RankEstimate) -> tuple[int, Floats]:
    """Return the stream with most operations, and the end of each operation, ascending."""
    segments = Intervals.of(item.intervals).segments
    places = {id(segment): _places_by_stream(segment.intervals) for _, segment in segments}
    count: Counter[int] = Counter()
    for _, segment in segments:
        count.update({stream: len(found) for stream, found in places[id(segment)].items()})
    chosen = max(count, key=lambda stream: count[stream], default=0)
    ends = [segment.ends[places[id(segment)].get(chosen, [])] + at for at, segment in segments]
    return chosen, np.sort(np.concatenate(ends)) if ends else np.empty(0)


def _places_by_stream(intervals: Sequence[Interval]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place, interval in enumerate(intervals):
        if isinstance(interval.record, Kernel | Copy):
            found.setdefault(interval.record.stream, []).append(place)
    return found


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes of storages by records, in order.

    Attributes:
        storages: the number of the storage of each change.
        sizes: its new size in bytes.
        ops: operations of one stream before each change.
        labelled: the number of each storage that is given a category.
        labels: the category, as an index of `_CATEGORIES`.
        length: total operations of the stream.
    """

    storages: Integers
    sizes: Integers
    ops: Integers
    labelled: Integers
    labels: Integers
    length: int

    @classmethod
    def of(cls, records: Iterable[tuple[Record, int]], stream: int) -> _Changes:
        """Return the changes by records, each given with the number of its storage."""
        changes: list[tuple[int, int, int]] = []
        labels: list[tuple[int, int]] = []
        ops = 0
        for record, number in records:
            if isinstance(record, Kernel | Copy):
                ops += record.stream == stream
            elif isinstance(record, Allocate | Resize):
                changes.append((number, round_block(record.bytes), ops))
            elif isinstance(record, Free):
                changes.append((number, 0, ops))
            if isinstance(record, Allocate | Categorise):
                labels.append((number, _CODE[record.category]))
        storages, sizes, before = np.array(changes, dtype=np.int64).reshape(-1, 3).T
        labelled, codes = np.array(labels, dtype=np.int64).reshape(-1, 2).T
        return cls(storages=storages, sizes=sizes, ops=before, labelled=labelled, labels=codes, length=ops)

    @classmethod
    def joined(cls, parts: Sequence[_Changes]) -> _Changes:
        """Concatenate the changes of several sequences of records."""
        if not parts:
            return cls.of((), 0)
        bases = itertools.accumulate((part.length for part in parts), initial=0)
        return cls(
            storages=np.concatenate([part.storages for part in parts]),
            sizes=np.concatenate([part.sizes for part in parts]),
            ops=np.concatenate([part.ops + base for part, base in zip(parts, bases, strict=False)]),
            labelled=np.concatenate([part.labelled for part in parts]),
            labels=np.concatenate([part.labels for part in parts]),
            length=sum(part.length for part in parts),
        )

    def renumbered(self, numbers: Integers) -> _Changes:
        """Return the changes with other storages: ``numbers`` maps old numbers, as indices, to new ones."""
        return replace(self, storages=numbers[self.storages], labelled=numbers[self.labelled])

    def deltas(self) -> Integers:
        """Return the bytes by which each change increases its storage, which is empty at first."""
        order = np.argsort(self.storages, kind="stable")
        storages, sizes = self.storages[order], self.sizes[order]
        before = np.concatenate([[0], sizes[:-1]])[: len(sizes)]
        before[1:][storages[1:] != storages[:-1]] = 0
        found = np.empty_like(sizes)
        found[order] = sizes - before
        return found

    def categories(self, later: _Changes) -> Integers:
        """Return the final category of each change's storage, as an index of `_CATEGORIES`, by all labels."""
        labelled = np.concatenate([self.labelled, later.labelled])
        _, places = np.unique(np.concatenate([self.storages, labelled]), return_inverse=True)
        final = np.zeros(len(places), dtype=np.int64)
        # Of several labels of one storage the last one wins.
        final[places[len(self.storages) :]] = np.concatenate([self.labels, later.labels])
        return final[places[: len(self.storages)]]


def _changes(items: Iterable[Item], stream: int, known: dict[int, _Changes]) -> _Changes:
    """Return the changes by items of a trace; ``known`` caches those of segments."""
    found = []
    for in_segments, group in itertools.groupby(items, key=lambda item: isinstance(item, Instance)):
        if not in_segments:
            alone = (item for item in group if not isinstance(item, Instance))
            found.append(_Changes.of(((record, getattr(record, "storage", NONE)) for record in alone), stream))
            continue
        for instance in group:
            assert isinstance(instance, Instance)
            segment = instance.segment
            if id(segment) not in known:
                known[id(segment)] = _Changes.of(_numbered(segment), stream)
            numbers = np.array([*instance.own[0], *reversed(instance.outside)], dtype=np.int64)
            found.append(known[id(segment)].renumbered(numbers))
    return _Changes.joined(found)


def _numbered(segment: Segment) -> Iterable[tuple[Record, int]]:
    """Yield the records of a segment with their storages: own ones are numbered from 0 up, others from -1 down."""
    pairs = zip(segment.records, segment.slots, strict=True)
    return ((record, slot // 3 if slot >= 0 else slot + 1) for record, slot in pairs)
