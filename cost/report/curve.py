"""How much memory of each category is active at each moment of a step?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from legoai.cost.allocator import round_block
from legoai.cost.estimate import RankEstimate
from legoai.cost.timeline import Interval
from legoai.cost.trace import Allocate, Categorise, Category, Copy, Free, Kernel, Resize


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
    changes = list(_changes(item))
    width = item.breakdown.seconds / points
    kept: dict[int, Point] = {}
    for point in changes:
        place = int(point.at / width) if width else 0
        if place not in kept or point.total > kept[place].total:
            kept[place] = point
    # The first of all is the state at the beginning, and the last the state at the end.
    inner = [point for point in kept.values() if point is not changes[0] and point is not changes[-1]]
    return (changes[0], *sorted(inner, key=lambda point: point.at), changes[-1])


def _changes(item: RankEstimate) -> Iterator[Point]:
    held = _final_categories(item)
    alive: dict[int, int] = {}
    active: Counter[Category] = Counter()
    times = _Times(item)
    begun = False
    for index, record in enumerate(item.trace.records[: item.span.stop]):
        if index == item.span.start:
            begun = True
            yield Point(0.0, dict(active))
        if begun and isinstance(record, Kernel | Copy):
            times.reach(record)
            continue
        if isinstance(record, Allocate):
            alive[record.storage] = round_block(record.bytes)
            active[held[record.storage]] += alive[record.storage]
        elif isinstance(record, Free):
            active[held[record.storage]] -= alive.pop(record.storage)
        elif isinstance(record, Resize):
            size = round_block(record.bytes)
            active[held[record.storage]] += size - alive[record.storage]
            alive[record.storage] = size
        else:
            continue
        if begun:
            yield Point(times.now, dict(active))
    yield Point(item.breakdown.seconds, dict(active))


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
