"""Which parts of a trace repeat, and how are they repeated without being run again?

Storages, collectives and events are known by number. Two parts of a trace are equal if their records are, once every
number is told by where it was made: in the part itself, in the part before it, or earlier still.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from legoai.cost.trace import (
    Allocate,
    Categorise,
    Collective,
    Free,
    HostWaitEvent,
    Mark,
    Record,
    RecordEvent,
    Resize,
    WaitEvent,
    WaitWork,
)

Kind: TypeAlias = Literal["storage", "work", "event"]
Number: TypeAlias = tuple[Kind, int]

_FIELD: Final[dict[type, Kind]] = {
    Allocate: "storage", Categorise: "storage", Free: "storage", Resize: "storage",
    Collective: "work", WaitWork: "work", RecordEvent: "event", WaitEvent: "event", HostWaitEvent: "event",
}  # fmt: skip
"""The field of a record that is a number."""

_MAKES: Final = (Allocate, Collective, RecordEvent)

MICRO_BATCH: Final = "micro batch "


def renumber(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records with storages, collectives and events counted from 0 in the order in which they appear."""
    names: dict[Number, int] = {}
    counts: dict[Kind, int] = {"storage": 0, "work": 0, "event": 0}

    def name(number: Number) -> int:
        if number not in names:
            names[number] = counts[number[0]]
            counts[number[0]] += 1
        return names[number]

    return tuple(_renamed(record, name) for record in records)


def repeat_micro_batches(records: Sequence[Record], *, wanted: int) -> tuple[Record, ...] | None:
    """Lengthen the steps of a trace to more micro batches.

    Each step has at least five micro batches. Its last but one is repeated, which is right if it is equal to the one
    before it, and if what that one made is gone when it ends.

    Args:
        records: whole steps, and what is before them.
        wanted: micro batches of a step.

    Returns:
        The records, renumbered; None where the two are not equal.
    """
    result = list(records)
    for marks in _starts(result):
        have = len(marks)
        assert have >= 5, "the first, the last, and three between them, of which two are compared"
        if have == wanted:
            continue
        before, first, second, last = marks[-4:]
        earlier, one, two = result[before:first], result[first:second], result[second:last]
        if _told(one, earlier) != _told(two, one) or not _made(one) <= _dropped(one) | _dropped(two):
            return None
        copies, names = _copies(two, one, wanted - have, have - 1)
        rest = [_renamed(record, functools.partial(_look_up, names)) for record in result[last:]]
        _renumber_mark(rest, wanted - 1)
        result[last:] = [*copies, *rest]
    return renumber(result)


def _starts(records: Sequence[Record]) -> list[list[int]]:
    """Return, for each step from the last to the first, where its micro batches begin."""
    found: list[list[int]] = []
    for index, record in enumerate(records):
        if isinstance(record, Mark):
            if record.name.startswith("step "):
                found.append([])
            elif record.name.startswith(MICRO_BATCH):
                found[-1].append(index)
    return found[::-1]


def _number(record: Record) -> Number | None:
    kind = _FIELD.get(type(record))
    return None if kind is None else (kind, getattr(record, kind))


def _look_up(names: Mapping[Number, int], number: Number) -> int:
    return names.get(number, number[1])


def _renamed(record: Record, name: Callable[[Number], int]) -> Record:
    number = _number(record)
    if number is None:
        return record
    new = name(number)
    return record if new == number[1] else dataclasses.replace(record, **{number[0]: new})  # type: ignore[arg-type]


def _made(records: Iterable[Record]) -> set[int]:
    return {record.storage for record in records if isinstance(record, Allocate)}


def _dropped(records: Iterable[Record]) -> set[int]:
    return {record.storage for record in records if isinstance(record, Free)}


def _order(records: Iterable[Record]) -> dict[Number, int]:
    """Return the numbers that are made in some records, and their order."""
    found: dict[Number, int] = {}
    for record in records:
        number = _number(record)
        if isinstance(record, _MAKES) and number is not None:
            found.setdefault(number, len(found))
    return found


def _told(records: Sequence[Record], before: Sequence[Record]) -> list[object]:
    """Return the records with their numbers told by where they were made."""
    own, theirs = _order(records), _order(before)
    told: list[object] = []
    for record in records:
        number = _number(record)
        if number is None:
            micro_batch = isinstance(record, Mark) and record.name.startswith(MICRO_BATCH)
            told.append(MICRO_BATCH if micro_batch else record)
            continue
        place = ("own", own[number]) if number in own else ("before", theirs.get(number, -1))
        if place[1] < 0:
            place = ("earlier", number[1])
        told.append((place, dataclasses.replace(record, **{number[0]: 0})))  # type: ignore[arg-type]
    return told


def _copies(
    part: Sequence[Record], before: Sequence[Record], count: int, next_mark: int
) -> tuple[list[Record], dict[Number, int]]:
    """Return a part so many times, and how the last one names what the part had made."""
    order, theirs = _order(part), _order(before)
    numbers = list(order)
    base = max((number[1] for number in (*order, *theirs)), default=0) + 1_000_000_000
    copies: list[Record] = []
    current: dict[Number, int] = {number: number[1] for number in numbers}
    place_of_theirs = {place: number for number, place in theirs.items()}
    own_of_theirs = {
        theirs_number: numbers[place] for place, theirs_number in place_of_theirs.items() if place < len(numbers)
    }
    for index in range(count):
        previous = current
        current = {number: base + index * len(numbers) + place for place, number in enumerate(numbers)}

        def name(number: Number, current: dict[Number, int] = current, previous: dict[Number, int] = previous) -> int:
            if number in current:
                return current[number]
            return previous[own_of_theirs[number]] if number in own_of_theirs else number[1]

        copy = [_renamed(record, name) for record in part]
        _renumber_mark(copy, next_mark + index)
        copies.extend(copy)
    return copies, current


def _renumber_mark(records: list[Record], number: int) -> None:
    """Give the micro batch with which the records begin its number."""
    first = records[0]
    assert isinstance(first, Mark) and first.name.startswith(MICRO_BATCH)
    records[0] = Mark(f"{MICRO_BATCH}{number}")
