"""Editable traces, whose sections are compared and renumbered.

Records refer to storages, collectives and events by number. An editable trace keeps the numbers beside the records, so
that records that are equal apart from their number are the same object.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import FIELD, MAKES, NONE, encoded, renumbered
from legoai.cost.trace.records import Mark, Record


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one kernel, each with its storage and its share of the traffic.

    Attributes:
        inputs: the number of each input's storage, encoded; `NONE` where it has none.
        outputs: the number of each newly allocated output's storage, encoded.
        read: bytes that the kernel reads of each input.
        written: bytes that it writes of each input.
        new: bytes that it writes of each newly allocated output.
        whole: whether the shares add up to what the kernel reads and writes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    new: tuple[int, ...]
    whole: bool


class _Fields(NamedTuple):
    """Fields of a type of record but for its number, and the indices of those that a key replaces; -1 for none."""

    values: Callable[[Any], tuple[Any, ...]]
    ranks: int
    attributes: int


@functools.cache
def _fields(kind: type) -> _Fields:
    numbered = FIELD.get(kind)
    names: list[str] = [name for name in kind.__slots__ if name != numbered]  # type: ignore[attr-defined]

    def place(name: str) -> int:
        return names.index(name) if name in names else -1

    def few(record: Any) -> tuple[Any, ...]:
        return tuple([getattr(record, name) for name in names])

    return _Fields(attrgetter(*names) if len(names) > 1 else few, place("ranks"), place("attributes"))


def key_of(record: Record) -> object:
    """Return a key that is equal for records that are equal apart from their number."""
    kind: type = type(record)
    fields = _fields(kind)
    values = fields.values(record)
    if fields.ranks >= 0:
        # The ranks of a group, which may number thousands, are the same tuple for the same group.
        return (kind, *values[: fields.ranks], id(values[fields.ranks]), *values[fields.ranks + 1 :])
    if fields.attributes < 0:
        return (kind, *values)
    attributes = tuple(values[fields.attributes].items())
    values = (*values[: fields.attributes], attributes, *values[fields.attributes + 1 :])
    try:
        hash(attributes)
    except TypeError:  # an attribute is a list
        return kind, repr(list(values))
    return (kind, *values)


Made: TypeAlias = tuple[object, int]
"""Definition of a number: the key of its record, and its index among definitions with that key."""


@dataclasses.dataclass(slots=True)
class EditableTrace:
    """Records, the number of each (`NONE` for none), and the operands of some kernels.

    The numbers in the records themselves are not used.

    Attributes:
        records: those that are equal apart from their number are the same object.
        numbers: of each record, encoded.
        operands: of some kernels.
    """

    records: list[Record]
    numbers: list[int]
    operands: list[Operands | None]

    @classmethod
    def of(cls, records: Sequence[Record], operands: Sequence[Operands | None] | None = None) -> EditableTrace:
        """Return the editable trace of records."""
        numbers: list[int] = []
        kept: list[Record] = []
        same: dict[object, Record] = {}
        for record in records:
            kind = FIELD.get(type(record))
            numbers.append(NONE if kind is None else encoded(kind, getattr(record, kind)))
            kept.append(same.setdefault(key_of(record), record))
        return cls(kept, numbers, [None] * len(records) if operands is None else list(operands))

    def __len__(self) -> int:
        return len(self.records)

    def made(self, start: int, stop: int) -> dict[int, Made]:
        """Return the definitions of the numbers that are defined between two indices.

        The order within a definition is counted from the end, so that additional definitions at the start, as by a
        first micro batch that all-gathers for all, change nothing.
        """
        first: dict[int, Record] = {}
        for record, number in zip(self.records[start:stop], self.numbers[start:stop], strict=True):
            if number != NONE and isinstance(record, MAKES):
                first.setdefault(number, record)
        counts: Counter[object] = Counter()
        found = {}
        for number in reversed(first):
            kind = key_of(first[number])
            found[number] = kind, counts[kind]
            counts[kind] += 1
        return found

    def finished(self) -> tuple[Record, ...]:
        """Return the records with storages, collectives and events numbered from 0 in order of appearance."""
        return tuple(
            record
            if number == NONE or getattr(record, FIELD[type(record)]) == number // 3
            else renumbered(record, number // 3)
            for record, number in zip(self.records, self._counted(), strict=True)
        )

    def _counted(self) -> list[int]:
        """Return the numbers, still encoded, counted from 0 in order of appearance."""
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


def is_micro_batch(record: Record) -> bool:
    """Whether a record begins a micro batch."""
    return isinstance(record, Mark) and record.name.startswith(MICRO_BATCH)


def micro_batches(records: Iterable[Record]) -> list[list[int]]:
    """Return the indices at which micro batches begin, for each step."""
    found: list[list[int]] = []
    for index, record in enumerate(records):
        if isinstance(record, Mark):
            if record.name.startswith("step "):
                found.append([])
            elif record.name.startswith(MICRO_BATCH):
                found[-1].append(index)
    return found
