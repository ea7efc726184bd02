"""Traces: the ops of one rank in its steps, with repeated segments stored once."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, overload

from legoai.cost.trace.numbers import FIELD, renumbered
from legoai.cost.trace.records import Mark, Record
from legoai.cost.trace.rounds import Rounds
from legoai.cost.trace.segments import KIND_OF, Instance, Item
from legoai.cost.trace.summaries import Summarised
from legoai.cost.trace.translation import Translation

_STEP: Final = "step "


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(Summarised):
    """The ops of one rank, in the order in which its host issues them: a segmented trace.

    A trace is composed of ops and of instances of segments; one without instances is the simple case::

        block = first_instance(records)                  # captured once
        again = Instance(block.segment, own, outside)    # the same ops on other storages, collectives and events
        Trace(rank=0, world=8, stage=0, items=[*before, block, again, *behind])

    Analyses process each segment once (:meth:`~legoai.cost.trace.summaries.Summarised.summary`). Traces are equal if
    their records are equal one by one.

    Attributes:
        rank: global rank that was simulated.
        world: ranks of the program.
        stage: its coordinate on the pipeline axis.
        items: ops, and instances of segments.
        translation: from the names in the segments to those of this rank; None where they are the same.
        rounds: equal micro batches among the items; None where none are known.
    """

    rank: int
    world: int
    stage: int
    items: Sequence[Item]
    translation: Translation | None = None
    rounds: Rounds | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        mine, theirs = (self.rank, self.world, self.stage), (other.rank, other.world, other.stage)
        return mine == theirs and self.records == other.records

    def __hash__(self) -> int:
        return hash((self.rank, self.world, self.stage))

    @functools.cached_property
    def records(self) -> Sequence[Record]:
        """The single ops, with the names of this rank.

        Where the trace has segments, storages, collectives and events are numbered from 0 in order of appearance,
        whatever their numbers in :attr:`items` are.
        """
        return _Records(self.items, self.translation) if self.segmented else self.items  # type: ignore[return-value]

    @functools.cached_property
    def segmented(self) -> bool:
        """Whether any of the items is an instance of a segment."""
        return any(type(item) is Instance for item in self.items)

    def forget(self) -> None:
        """Drop the results of analyses, which may be as large as the trace."""
        self._summaries.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_summaries"}

    def placed(self, kinds: AbstractSet[type]) -> Iterator[tuple[int, Item]]:
        """Yield all instances, and the ops of some types, each with the sequence number of its first record."""
        if not self.segmented:
            return ((index, item) for index, item in enumerate(self.items) if type(item) in kinds)
        starts = itertools.accumulate(map(length, self.items), initial=0)
        return (
            (index, item)
            for index, item in zip(starts, self.items, strict=False)
            if type(item) is Instance or type(item) in kinds
        )

    def between(self, span: range) -> Sequence[Item]:
        """Return the items of a range of records.

        Args:
            span: their sequence numbers; the range neither begins nor ends within an instance.
        """
        if not self.segmented:
            return self.items[span.start : span.stop]
        ends = list(itertools.accumulate(map(length, self.items), initial=0))
        return self.items[bisect.bisect_left(ends, span.start) : bisect.bisect_left(ends, span.stop)]

    @functools.cached_property
    def steps(self) -> list[range]:
        """The sequence numbers of the records of each step, its marks included.

        Raises:
            ValueError: a step has no end.
        """
        begun: dict[str, int] = {}
        found = []
        for index, item in self.placed({Mark}):
            if isinstance(item, Mark):
                if item.name.startswith(_STEP):
                    begun[item.name] = index
                elif item.name.removeprefix("end ") in begun:
                    found.append(range(begun.pop(item.name.removeprefix("end ")), index + 1))
        if begun:
            raise ValueError(f"the trace has no end of {', '.join(begun)}")
        return found

    def once_each(self, *, translated: bool = False) -> Iterator[Record]:
        """Yield the single ops, and those of each segment once; the numbers in the latter are not used.

        Args:
            translated: whether the latter have the names of their instance rather than those of the segment.
        """
        if not self.segmented:
            return iter(self.records)
        segments = {id(item.segment): item.segment for item in self.items if isinstance(item, Instance)}
        alone = (item for item in self.items if not isinstance(item, Instance))
        inside = itertools.chain.from_iterable(segment.records for segment in segments.values())
        named = map(self.translation.record, inside) if translated and self.translation is not None else inside
        return itertools.chain(alone, named)


def records_of(items: Iterable[Item], translation: Translation | None = None) -> Iterator[Record]:
    """Yield every record of some items, with its number.

    Args:
        items: ops, and instances of segments.
        translation: from the names in the segments to those of the rank; None where they are the same.
    """
    for item in items:
        if not isinstance(item, Instance):
            yield item
        elif translation is None:
            yield from item.records()
        else:
            yield from map(translation.record, item.records())


def length(item: Item) -> int:
    """Return the number of records of an item."""
    return len(item.segment.records) if isinstance(item, Instance) else 1


class _Records(Sequence[Record]):
    """A view of items as records; equal to any other sequence of the same records."""

    def __init__(self, items: Sequence[Item], translation: Translation | None = None) -> None:
        self.items = items
        self.translation = translation
        self._size = sum(map(length, self.items))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Record]:
        names: tuple[dict[int, int], ...] = ({}, {}, {})
        for record in records_of(self.items, self.translation):
            yield _counted(record, names)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return tuple(itertools.islice(self, start, stop, step)) if step > 0 else tuple(self)[index]
        left = range(len(self))[index]
        names: tuple[dict[int, int], ...] = ({}, {}, {})
        for item in self.items:
            here = length(item)
            if left < here:
                meant = next(itertools.islice(records_of([item], self.translation), left, None))
                for before in itertools.islice(records_of([item]), left):
                    _counted(before, names)
                return _counted(meant, names)
            left -= here
            if not isinstance(item, Instance):
                _counted(item, names)
            elif any(item.number(slot) not in names[kind] for slot, kind in item.segment.outside):
                for record in item.records():
                    _counted(record, names)
            else:
                for known, numbers in zip(names, item.own, strict=True):
                    for number in numbers:
                        known.setdefault(number, len(known))
        raise AssertionError("the length is the sum of those of the items")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((type(self), len(self)))


def _counted(record: Record, names: Sequence[dict[int, int]]) -> Record:
    """Return a record with its number counted in order of appearance."""
    name = FIELD.get(type(record))
    if name is None:
        return record
    known, number = names[KIND_OF[type(record)]], getattr(record, name)
    new = known.setdefault(number, len(known))
    return record if new == number else renumbered(record, new)
