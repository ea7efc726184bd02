"""How is a trace held while its parts are compared, repeated and renamed?

Storages, collectives and events are known by number. A tape keeps the numbers beside the records, so that a part is
repeated by repeating its records as they are and giving the numbers new names; only the finished tape makes records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

from legoai.cost.trace.records import (
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
KINDS: Final[tuple[Kind, ...]] = ("storage", "work", "event")

FIELD: Final[dict[type, Kind]] = {
    Allocate: "storage", Categorise: "storage", Free: "storage", Resize: "storage",
    Collective: "work", WaitWork: "work", RecordEvent: "event", WaitEvent: "event", HostWaitEvent: "event",
}  # fmt: skip
"""The field of a record that is a number."""

MAKES: Final = (Allocate, Collective, RecordEvent)
"""Records that give a number its meaning."""

MICRO_BATCH: Final = "micro batch "
NONE: Final = -1

_RENAMED: Final[dict[type, Callable[[Any, int], Record]]] = {
    Allocate: lambda r, n: Allocate(
        storage=n, bytes=r.bytes, stream=r.stream, category=r.category, module=r.module, phase=r.phase
    ),
    Categorise: lambda r, n: Categorise(n, r.category, r.module),
    Free: lambda r, n: Free(n),
    Resize: lambda r, n: Resize(n, r.bytes, r.stream),
    WaitWork: lambda r, n: WaitWork(r.stream, n),
    RecordEvent: lambda r, n: RecordEvent(n, r.stream),
    WaitEvent: lambda r, n: WaitEvent(r.stream, n),
    HostWaitEvent: lambda r, n: HostWaitEvent(n),
    Collective: lambda r, n: Collective(
        work=n,
        stream=r.stream,
        kind=r.kind,
        ranks=r.ranks,
        axis=r.axis,
        bytes=r.bytes,
        dtype=r.dtype,
        module=r.module,
        phase=r.phase,
    ),
}
"""How a record gets another number, faster than `dataclasses.replace`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Touch:
    """The tensors of one kernel, each with its storage and its share of the traffic.

    Attributes:
        inputs: the number of each input's storage, as a tape encodes it; `NONE` where it has none.
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

    def renamed(self, name: Callable[[int], int]) -> Touch:
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


def encoded(kind: Kind, number: int) -> int:
    """Return a number that tells its kind."""
    return number * 3 + KINDS.index(kind)


@dataclasses.dataclass(slots=True)
class Tape:
    """Records, the number of each (`NONE` for none), and what some kernels touch.

    The number in a record itself means nothing.
    """

    records: list[Record]
    numbers: list[int]
    touches: list[Touch | None]

    @classmethod
    def of(cls, records: Sequence[Record], touches: Sequence[Touch | None] | None = None) -> Tape:
        """Return the tape of records, those that are equal but for their number being the same object."""
        numbers, kept = [], []
        same: dict[object, Record] = {}
        for record in records:
            kind = FIELD.get(type(record))
            numbers.append(NONE if kind is None else encoded(kind, getattr(record, kind)))
            kept.append(same.setdefault(_key(record), record))
        return cls(kept, numbers, [None] * len(records) if touches is None else list(touches))

    def __len__(self) -> int:
        return len(self.records)

    def part(self, start: int, stop: int) -> Tape:
        """Return some of the records."""
        return Tape(self.records[start:stop], self.numbers[start:stop], self.touches[start:stop])

    def extend(self, other: Tape) -> None:
        """Append another tape."""
        self.records.extend(other.records)
        self.numbers.extend(other.numbers)
        self.touches.extend(other.touches)

    def renamed(self, name: Callable[[int], int]) -> Tape:
        """Return the same records with other numbers."""
        return Tape(
            list(self.records),
            [number if number == NONE else name(number) for number in self.numbers],
            [None if touch is None else touch.renamed(name) for touch in self.touches],
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
            append(record if getattr(record, kind_name) == new else _RENAMED[type(record)](record, new))
        return tuple(result)


def renamed(record: Record, number: int) -> Record:
    """Return a record that has a number with another one."""
    return _RENAMED[type(record)](record, number)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running: among a million records that live it finds nothing, over and over.

    What a program leaves in cycles then lives to the end, in every run alike.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def alike(first: Record, second: Record) -> bool:
    """Whether two records are equal, whatever their numbers are, and whichever micro batch they begin."""
    kind = type(first)
    if kind is not type(second):
        return False
    field = FIELD.get(kind)
    if field is not None:
        return bool(_RENAMED[kind](first, 0) == _RENAMED[kind](second, 0))
    if isinstance(first, Mark) and isinstance(second, Mark) and first.name.startswith(MICRO_BATCH):
        return second.name.startswith(MICRO_BATCH)
    return first == second


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
