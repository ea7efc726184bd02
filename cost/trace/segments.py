"""How is a trace held in which the same is done over and over, without a record for each time?

A :class:`Part` has the records of what is done, and a :class:`Use` says of which storages, collectives and events that
is done once more. What asks for records gets them, one after the other, as if each had been written down; what only
adds up can look at each part once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, overload

from legoai.cost.trace.records import Record
from legoai.cost.trace.tape import FIELD, KINDS, MAKES, NONE, renamed
from legoai.cost.trace.translation import Renaming

KIND_OF: Final = {record: KINDS.index(kind) for record, kind in FIELD.items()}
"""The kind of a record's number, as its place in `KINDS`."""

_FIRST_OUTSIDE: Final = -2


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is done, whichever numbers it is done to.

    Attributes:
        records: in their order; the numbers in them mean nothing.
        slots: of each record the slot of its number, see :meth:`Use.number`; `NONE` for a record without.
        known: what is kept of the part by those who ask the same of it again.
    """

    records: tuple[Record, ...]
    slots: tuple[int, ...]
    known: dict[object, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[Part], tuple[object, ...]]:
        return Part, (self.records, self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A part, done to these storages, collectives and events.

    Attributes:
        part: what is done.
        own: the numbers of the storages, collectives and events that are made by it, in the order of their slots.
        outside: the numbers of those that are named and not made.
    """

    part: Part
    own: tuple[Sequence[int], Sequence[int], Sequence[int]]
    outside: tuple[int, ...]

    def number(self, slot: int) -> int:
        """Return the number for which a slot stands."""
        if slot >= 0:
            return self.own[slot % 3][slot // 3]
        return self.outside[_FIRST_OUTSIDE - slot]

    def records(self) -> Iterator[Record]:
        """Yield the records with their numbers."""
        for record, slot in zip(self.part.records, self.part.slots, strict=True):
            yield record if slot == NONE else renamed(record, self.number(slot))


Item: TypeAlias = Record | Use


def slot_outside(place: int) -> int:
    """Return the slot of one of the numbers that a part names and does not make."""
    return _FIRST_OUTSIDE - place


def slot_inside(kind: int, place: int) -> int:
    """Return the slot of one of the numbers of a kind, counted as in `KINDS`, that a part makes."""
    return place * 3 + kind


def used(records: Sequence[Record]) -> Use:
    """Return some records as the use of a part of its own.

    What they make and what they name are told apart by whether they make it anywhere.
    """
    own: tuple[dict[int, int], ...] = ({}, {}, {})
    for record in records:
        if isinstance(record, MAKES):
            made = own[KIND_OF[type(record)]]
            made.setdefault(getattr(record, FIELD[type(record)]), len(made))
    outside: dict[tuple[int, int], int] = {}
    slots = []
    for record in records:
        field_name = FIELD.get(type(record))
        if field_name is None:
            slots.append(NONE)
            continue
        kind, number = KIND_OF[type(record)], getattr(record, field_name)
        place = own[kind].get(number)
        if place is None:
            slots.append(slot_outside(outside.setdefault((kind, number), len(outside))))
        else:
            slots.append(slot_inside(kind, place))
    first, second, third = (tuple(made) for made in own)
    return Use(Part(tuple(records), tuple(slots)), (first, second, third), tuple(number for _, number in outside))


class Composed(Sequence[Record]):
    """The records of a trace, some of which are held as uses of parts.

    They are equal to any other records that are the same one by one. Storages, collectives and events are counted from
    0 as they appear, whatever their numbers in :attr:`items` are.

    Attributes:
        items: records, and uses of parts.
        renaming: from the names in the parts to those that are meant; None where they are the same.
    """

    def __init__(self, items: Iterable[Item], renaming: Renaming | None = None) -> None:
        self.items = tuple(items)
        self.renaming = renaming
        self._size = sum(len(item.part.records) if isinstance(item, Use) else 1 for item in self.items)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Record]:
        names: tuple[dict[int, int], ...] = ({}, {}, {})
        renamed_part = self.renaming.record if self.renaming is not None else None
        for item in self.items:
            if not isinstance(item, Use):
                yield _counted(item, names)
                continue
            for record in item.records():
                yield _counted(record if renamed_part is None else renamed_part(record), names)

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
            length = length_of(item)
            if left < length:
                record = next(itertools.islice(records_of([item]), left, None))
                meant = self.renaming.record(record) if self.renaming is not None and isinstance(item, Use) else record
                for before in itertools.islice(records_of([item]), left):
                    _counted(before, names)
                return _counted(meant, names)
            left -= length
            if not isinstance(item, Use):
                _counted(item, names)
            elif any(item.number(slot) not in names[kind] for slot, kind in _named(item.part)):
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


def _named(part: Part) -> list[tuple[int, int]]:
    """Return the slots of numbers that a part names and does not make, each with its kind as a place in `KINDS`."""
    found: list[tuple[int, int]] | None = part.known.get("named")
    if found is None:
        pairs = zip(part.records, part.slots, strict=True)
        found = list({slot: KIND_OF[type(record)] for record, slot in pairs if slot < NONE}.items())
        part.known["named"] = found
    return found


def _counted(record: Record, names: Sequence[dict[int, int]]) -> Record:
    """Return a record whose number is counted as it appears."""
    name = FIELD.get(type(record))
    if name is None:
        return record
    known, number = names[KIND_OF[type(record)]], getattr(record, name)
    new = known.setdefault(number, len(known))
    return record if new == number else renamed(record, new)


def renaming_of(records: Sequence[Record]) -> Renaming | None:
    """Return how the names in a trace's parts are to be understood."""
    return records.renaming if isinstance(records, Composed) else None


def items_of(records: Sequence[Record]) -> Sequence[Item]:
    """Return what a trace's records are held as."""
    return records.items if isinstance(records, Composed) else records


def length_of(item: Item) -> int:
    """Return for how many records an item stands."""
    return len(item.part.records) if isinstance(item, Use) else 1


def items_between(records: Sequence[Record], span: range) -> Sequence[Item]:
    """Return what some of a trace's records are held as.

    Args:
        records: of the trace.
        span: their places; it neither begins nor ends within a use of a part.
    """
    if not isinstance(records, Composed):
        return records[span.start : span.stop]
    ends = list(itertools.accumulate(map(length_of, records.items), initial=0))
    return records.items[bisect.bisect_left(ends, span.start) : bisect.bisect_left(ends, span.stop)]


def records_of(items: Iterable[Item], renaming: Renaming | None = None) -> Iterator[Record]:
    """Yield the records for which items stand, with their numbers.

    Args:
        items: records, and uses of parts.
        renaming: from the names in the parts to those that are meant; None where they are the same.
    """
    for item in items:
        if not isinstance(item, Use):
            yield item
        elif renaming is None:
            yield from item.records()
        else:
            yield from map(renaming.record, item.records())


def once_each(records: Sequence[Record]) -> Iterator[Record]:
    """Return the records of a trace, but those of a part only once, with numbers that mean nothing."""
    if not isinstance(records, Composed):
        return iter(records)
    parts = {id(item.part): item.part for item in records.items if isinstance(item, Use)}
    alone = (item for item in records.items if not isinstance(item, Use))
    return itertools.chain(alone, *(part.records for part in parts.values()))
