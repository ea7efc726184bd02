"""Editable traces, whose parts are compared, repeated and renumbered.

Records name storages, collectives and events by number. An editable trace keeps the numbers beside the records, so that
a part is repeated by repeating its records as they are and renumbering. Where parts are repeated it keeps their bounds
as sections; the finished trace stores a segment once for all sections that have the same records.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import FIELD, MAKES, NONE, encoded, renumbered
from legoai.cost.trace.records import Mark, Record
from legoai.cost.trace.segments import Instance, Item, Segment, slot_inside, slot_outside
from legoai.cost.trace.translation import Translation


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one kernel, each with its storage and its share of the traffic.

    Attributes:
        inputs: the number of each input's storage, encoded; `NONE` where it has none.
        outputs: of each new result.
        read: bytes that the kernel reads of each input.
        written: bytes that it writes of each input.
        new: bytes that it writes of each new result.
        whole: whether the shares add up to what the kernel reads and writes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    new: tuple[int, ...]
    whole: bool

    def renumbered(self, name: Callable[[int], int]) -> Operands:
        """Return the same of other storages."""
        return dataclasses.replace(
            self,
            inputs=tuple(NONE if number == NONE else name(number) for number in self.inputs),
            outputs=tuple(NONE if number == NONE else name(number) for number in self.outputs),
        )


def _key(record: Record) -> object:
    """Return what two records have in common that are equal but for their number."""
    kind = type(record)
    numbered = FIELD.get(kind)
    values = [
        # The ranks of a group, of whom there may be thousands, are the same tuple for the same group.
        tuple(value.items()) if isinstance(value, dict) else id(value) if name == "ranks" else value
        for name in kind.__slots__
        if name != numbered
        for value in (getattr(record, name),)
    ]
    try:
        found = kind, *values
        hash(found)
    except TypeError:  # an attribute that is a list
        return kind, repr(values)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Records of which others may be a repetition.

    Attributes:
        start: index of the first.
        stop: index behind the last.
        translation: from the names of modules in the records to those that are meant; None where they are the same.
    """

    start: int
    stop: int
    translation: Translation | None = None


@dataclasses.dataclass(slots=True)
class EditableTrace:
    """Records, the number of each (`NONE` for none), and what some kernels used.

    The number in a record itself means nothing.

    Attributes:
        records: those that are equal but for their number are the same object.
        numbers: of each record, encoded.
        operands: of some kernels.
        sections: ascending; none overlaps another.
    """

    records: list[Record]
    numbers: list[int]
    operands: list[Operands | None]
    sections: list[Section] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, records: Sequence[Record], operands: Sequence[Operands | None] | None = None) -> EditableTrace:
        """Return the editable trace of records, those that are equal but for their number being the same object."""
        numbers, kept = [], []
        same: dict[object, Record] = {}
        for record in records:
            kind = FIELD.get(type(record))
            numbers.append(NONE if kind is None else encoded(kind, getattr(record, kind)))
            kept.append(same.setdefault(_key(record), record))
        return cls(kept, numbers, [None] * len(records) if operands is None else list(operands))

    def __len__(self) -> int:
        return len(self.records)

    def part(self, start: int, stop: int) -> EditableTrace:
        """Return some of the records."""
        return EditableTrace(
            self.records[start:stop],
            self.numbers[start:stop],
            self.operands[start:stop],
            self.sections_between(start, stop, -start),
        )

    def sections_between(self, start: int, stop: int, shift: int) -> list[Section]:
        """Return what of the sections is between two indices, at other indices."""
        return [
            Section(max(item.start, start) + shift, min(item.stop, stop) + shift, item.translation)
            for item in self.sections
            if item.start < stop and start < item.stop
        ]

    def spelled_out(self) -> EditableTrace:
        """Return the same trace with the names that are meant in the records, the same record having the same one."""
        if all(item.translation is None for item in self.sections):
            return self
        records, known = list(self.records), dict[tuple[int, int], Record]()
        for item in self.sections:
            if item.translation is None:
                continue
            for index in range(item.start, item.stop):
                key = id(records[index]), id(item.translation)
                if key not in known:
                    known[key] = item.translation.record(records[index])
                records[index] = known[key]
        sections = [Section(item.start, item.stop) for item in self.sections]
        return EditableTrace(records, self.numbers, self.operands, sections)

    def extend(self, other: EditableTrace) -> None:
        """Append another one."""
        self.sections += other.sections_between(0, len(other), len(self))
        self.records.extend(other.records)
        self.numbers.extend(other.numbers)
        self.operands.extend(other.operands)

    def renumbered(self, name: Callable[[int], int]) -> EditableTrace:
        """Return the same records with other numbers."""
        return EditableTrace(
            list(self.records),
            [number if number == NONE else name(number) for number in self.numbers],
            [None if used is None else used.renumbered(name) for used in self.operands],
            list(self.sections),
        )

    def made(self, start: int, stop: int) -> dict[int, int]:
        """Return the numbers that are made between two places, each with its order."""
        found: dict[int, int] = {}
        for record, number in zip(self.records[start:stop], self.numbers[start:stop], strict=True):
            if number != NONE and isinstance(record, MAKES):
                found.setdefault(number, len(found))
        return found

    def finished(self) -> tuple[Item, ...]:
        """Return the items of a trace, with storages, collectives and events counted from 0 as they appear.

        Sections of equal records are instances of one segment, whichever modules they name.
        """
        numbers = self._counted()
        shared = _Segments()
        drafts = [shared.draft(self.records[item.start : item.stop], numbers, item) for item in self.sections]
        result: list[Item] = []
        at = 0
        for item, draft in zip(self.sections, drafts, strict=True):
            self._append(result, numbers, at, item.start, None)
            instance = shared.instance(draft, item.translation)
            if instance is None:
                self._append(result, numbers, item.start, item.stop, item.translation)
            else:
                result.append(instance)
            at = item.stop
        self._append(result, numbers, at, len(self), None)
        return tuple(result)

    def _counted(self) -> list[int]:
        """Return the numbers, still encoded, counted from 0 as they appear."""
        names: dict[int, int] = {NONE: NONE}
        counts = [0, 1, 2]
        result = []
        for number in self.numbers:
            new = names.get(number)
            if new is None:
                kind = number % 3
                new = names[number] = counts[kind]
                counts[kind] += 3
            result.append(new)
        return result

    def _append(
        self, result: list[Item], numbers: Sequence[int], start: int, stop: int, translation: Translation | None
    ) -> None:
        """Append records one by one."""
        for index in range(start, stop):
            record, number = self.records[index], numbers[index]
            if translation is not None:
                record = translation.record(record)
            if number == NONE or getattr(record, FIELD[type(record)]) == number // 3:
                result.append(record)
            else:
                result.append(renumbered(record, number // 3))


@dataclasses.dataclass(slots=True)
class _Draft:
    """A section of a trace: what its segment is, and the numbers of the instance, decoded."""

    key: object
    records: Sequence[Record]
    slots: tuple[int, ...]
    own: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    outside: tuple[int, ...]


class _Segments:
    """Segments of the sections of a trace, one for those of the same records, and how often each is needed."""

    def __init__(self) -> None:
        self.count: Counter[object] = Counter()
        self.known: dict[object, Segment] = {}

    def draft(self, records: Sequence[Record], numbers: Sequence[int], section: Section) -> _Draft:
        """Return the draft of a section of a trace.

        Args:
            records: of the section.
            numbers: of the trace, encoded.
            section: where its numbers are.
        """
        own: tuple[dict[int, int], ...] = ({}, {}, {})
        named = list(zip(records, numbers[section.start : section.stop], strict=True))
        for record, number in named:
            if isinstance(record, MAKES):
                made = own[number % 3]
                made.setdefault(number, len(made))
        outside: dict[int, int] = {}
        slots = []
        for _, number in named:
            if number == NONE:
                slots.append(NONE)
                continue
            kind = number % 3
            index = own[kind].get(number)
            if index is None:
                slots.append(slot_outside(outside.setdefault(number, len(outside))))
            else:
                slots.append(slot_inside(kind, index))
        key = tuple(map(id, records)), tuple(slots)
        self.count[key] += 1
        storages, works, events = (tuple(number // 3 for number in made) for made in own)
        return _Draft(key, records, tuple(slots), (storages, works, events), tuple(n // 3 for n in outside))

    def instance(self, draft: _Draft, translation: Translation | None) -> Instance | None:
        """Return the instance of a section; None where no other is equal to it."""
        if self.count[draft.key] < _FEWEST:
            return None
        segment = self.known.get(draft.key)
        if segment is None:
            segment = self.known[draft.key] = Segment(tuple(draft.records), draft.slots)
        return Instance(segment, draft.own, draft.outside, translation)


_FEWEST: Final = 2
"""Equal sections from which on they are stored as a segment."""


def is_micro_batch(record: Record) -> bool:
    """Whether a record begins a micro batch."""
    return isinstance(record, Mark) and record.name.startswith(MICRO_BATCH)


def micro_batches(records: Iterable[Record]) -> list[list[int]]:
    """Return, for each step, where its micro batches begin."""
    found: list[list[int]] = []
    for index, record in enumerate(records):
        if isinstance(record, Mark):
            if record.name.startswith("step "):
                found.append([])
            elif record.name.startswith(MICRO_BATCH):
                found[-1].append(index)
    return found
