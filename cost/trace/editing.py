"""Editable traces, whose parts are compared, repeated and renumbered.

Records name storages, collectives and events by number. An editable trace keeps the numbers beside the records, so that
a part is repeated by repeating its records as they are and renumbering; only the finished trace makes new records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import FIELD, MAKES, NONE, encoded, renumbered
from legoai.cost.trace.records import Mark, Record


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


@dataclasses.dataclass(slots=True)
class EditableTrace:
    """Records, the number of each (`NONE` for none), and what some kernels used.

    The number in a record itself means nothing.
    """

    records: list[Record]
    numbers: list[int]
    operands: list[Operands | None]

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
        return EditableTrace(self.records[start:stop], self.numbers[start:stop], self.operands[start:stop])

    def extend(self, other: EditableTrace) -> None:
        """Append another one."""
        self.records.extend(other.records)
        self.numbers.extend(other.numbers)
        self.operands.extend(other.operands)

    def renumbered(self, name: Callable[[int], int]) -> EditableTrace:
        """Return the same records with other numbers."""
        return EditableTrace(
            list(self.records),
            [number if number == NONE else name(number) for number in self.numbers],
            [None if used is None else used.renumbered(name) for used in self.operands],
        )

    def made(self, start: int, stop: int) -> dict[int, int]:
        """Return the numbers that are made between two places, each with its order."""
        found: dict[int, int] = {}
        for record, number in zip(self.records[start:stop], self.numbers[start:stop], strict=True):
            if number != NONE and isinstance(record, MAKES):
                found.setdefault(number, len(found))
        return found

    def finished(self) -> tuple[Record, ...]:
        """Return the records, with storages, collectives and events counted from 0 as they appear."""
        names: dict[int, int] = {}
        counts = [0, 0, 0]
        result: list[Record] = []
        append = result.append
        for record, number in zip(self.records, self.numbers, strict=True):
            if number == NONE:
                append(record)
                continue
            new = names.get(number)
            if new is None:
                kind = number % 3
                new = names[number] = counts[kind]
                counts[kind] += 1
            kind_name = FIELD[type(record)]
            append(record if getattr(record, kind_name) == new else renumbered(record, new))
        return tuple(result)


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
