"""Curve of active memory over a step, by category."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from legoai.cost.estimate import RankEstimate
from legoai.cost.memory.allocator import round_block
from legoai.cost.timing.timeline import Interval
from legoai.cost.trace.records import Allocate, Categorise, Category, Copy, Free, Kernel, Record, Resize


@dataclass(frozen=True, slots=True)
class Point:
    """Active bytes by category, from a moment of the step on, in seconds from its beginning."""

    at: float
    bytes: dict[Category, int]

    @property
    def total(self) -> int:
        """Active bytes of all categories."""
        return sum(self.bytes.values())


def memory_curve(item: RankEstimate, *, points: int = 1200) -> tuple[Point, ...]:
    """The curve of a rank, thinned to about so many points, of which none hides a higher one.

    A storage is there from the moment at which the stream that computes most reaches the place where the host made it,
    until it reaches the place where the host dropped it.
    """
    held = _final_categories(item)
    width = item.breakdown.seconds / points or 1.0
    alive: dict[int, int] = {}
    active: Counter[Category] = Counter()
    total = 0
    kept: list[Point] = []
    highest, bucket = -1, -1
    times = _Times(item)
    for index, record in enumerate(item.trace.records[: item.span.stop]):
        if index == item.span.start:
            kept.append(Point(0.0, dict(active)))
        begun = index >= item.span.start
        if isinstance(record, Kernel | Copy):
            if begun:
                times.reach(record)
            continue
        change = _change(record, alive)
        if change is None:
            continue
        storage, by = change
        active[held[storage]] += by
        total += by
        here = int(times.now / width)
        if begun and here != bucket:
            kept.append(Point(times.now, dict(active)))
            highest, bucket = total, here
        elif begun and total > highest:
            kept[-1] = Point(times.now, dict(active))
            highest = total
    return (*kept, Point(item.breakdown.seconds, dict(active)))


def _change(record: Record, alive: dict[int, int]) -> tuple[int, int] | None:
    """Which storage a record changes, and by how many bytes; ``alive`` is kept up with it."""
    if isinstance(record, Allocate):
        alive[record.storage] = round_block(record.bytes)
        return record.storage, alive[record.storage]
    if isinstance(record, Free):
        return record.storage, -alive.pop(record.storage)
    if isinstance(record, Resize):
        before, alive[record.storage] = alive[record.storage], round_block(record.bytes)
        return record.storage, alive[record.storage] - before
    return None


def _final_categories(item: RankEstimate) -> dict[int, Category]:
    found: dict[int, Category] = {}
    for record in item.trace.records:
        if isinstance(record, Allocate | Categorise):
            found[record.storage] = record.category
    return found


class _Times:
    """When the stream that computes most reaches a record."""

    def __init__(self, item: RankEstimate) -> None:
        by_stream: defaultdict[int, list[Interval]] = defaultdict(list)
        for interval in item.intervals:
            if isinstance(interval.record, Kernel | Copy):
                by_stream[interval.record.stream].append(interval)
        self.stream = max(by_stream, key=lambda stream: len(by_stream[stream]), default=0)
        self.ends: Sequence[float] = sorted(interval.end for interval in by_stream[self.stream])
        self.place = 0
        self.now = 0.0

    def reach(self, record: Kernel | Copy) -> None:
        """Go on behind an operation."""
        if record.stream == self.stream and self.place < len(self.ends):
            self.now = self.ends[self.place]
            self.place += 1
