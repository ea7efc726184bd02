"""Segments of a trace: ops that a rank issues several times, stored once.

A :class:`Segment` holds the records of the ops; an :class:`Instance` replays them on other storages, collectives and
events. The result of an analysis for a segment is computed once, as a summary of the type that the analysis defines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from legoai.cost.trace.numbers import FIELD, KINDS, MAKES, NONE, renumbered
from legoai.cost.trace.pickling import pickled_by_position
from legoai.cost.trace.records import Record
from legoai.cost.trace.summaries import Summarised
from legoai.cost.trace.translation import Translation

KIND_OF: Final = {record: KINDS.index(kind) for record, kind in FIELD.items()}
"""The kind of a record's number, as its index in `KINDS`."""

_FIRST_OUTSIDE: Final = -2


@dataclass(frozen=True, eq=False)
class Segment(Summarised):
    """Ops in order, independent of the storages, collectives and events that they use.

    Attributes:
        records: of the ops; the numbers in them are not used.
        slots: for each record the slot of its number, see :meth:`Instance.number`; `NONE` for a record without a
            number.
    """

    records: tuple[Record, ...]
    slots: tuple[int, ...]

    def __reduce__(self) -> tuple[type[Segment], tuple[object, ...]]:
        return Segment, (self.records, self.slots)

    @functools.cached_property
    def outside(self) -> tuple[tuple[int, int], ...]:
        """Slots of the numbers that the segment uses and does not define, each with its kind as an index in `KINDS`."""
        pairs = zip(self.records, self.slots, strict=True)
        return tuple({slot: KIND_OF[type(record)] for record, slot in pairs if slot < NONE}.items())


@pickled_by_position
@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """A segment, issued once on particular storages, collectives and events.

    Attributes:
        segment: the ops.
        own: the numbers of the storages, collectives and events that it defines, in the order of their slots.
        outside: the numbers that it uses and does not define, in the order of their slots.
        translation: from the names of modules in the segment to those of the instance; None where they are the same.
    """

    segment: Segment
    own: tuple[Sequence[int], Sequence[int], Sequence[int]]
    outside: Sequence[int]
    translation: Translation | None = None

    def __len__(self) -> int:
        return len(self.segment.records)

    def number(self, slot: int) -> int:
        """Return the number of a slot."""
        if slot >= 0:
            return self.own[slot % 3][slot // 3]
        return self.outside[outside_index(slot)]

    def records(self) -> Iterator[Record]:
        """Yield the records with their numbers and names."""
        translation = self.translation
        for record, slot in zip(self.segment.records, self.segment.slots, strict=True):
            named = record if translation is None else translation.record(record)
            yield named if slot == NONE else renumbered(named, self.number(slot))

    def path(self, path: str) -> str:
        """Return the module that a path in the segment denotes in this instance."""
        return path if self.translation is None else self.translation.path(path)


Item: TypeAlias = Record | Instance
"""An op by itself, or an instance of a segment."""


def slot_outside(index: int) -> int:
    """Return the slot of one of the numbers that a segment uses and does not define."""
    return _FIRST_OUTSIDE - index


def outside_index(slot: int) -> int:
    """Return the index of a slot among the numbers that a segment uses and does not define."""
    return _FIRST_OUTSIDE - slot


def slot_inside(kind: int, index: int) -> int:
    """Return the slot of one of the numbers of a kind, an index in `KINDS`, that a segment defines."""
    return index * 3 + kind


def first_instance(records: Sequence[Record]) -> Instance:
    """Return some records as the first instance of a segment of their own.

    A number is made by the segment if any of its records makes it; the others are outside.
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
        index = own[kind].get(number)
        if index is None:
            slots.append(slot_outside(outside.setdefault((kind, number), len(outside))))
        else:
            slots.append(slot_inside(kind, index))
    first, second, third = (tuple(made) for made in own)
    segment = Segment(tuple(records), tuple(slots))
    return Instance(segment, (first, second, third), tuple(number for _, number in outside))
