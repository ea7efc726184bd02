"""Numbers of storages, collectives and events in records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from legoai.cost.trace.marks import MICRO_BATCH
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
"""Records that define a number."""

NONE: Final = -1

_RENUMBERED: Final[dict[type, Callable[[Any, int], Record]]] = {
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
        issuer=r.issuer,
        calls=r.calls,
        communicator=r.communicator,
        members=r.members,
        of_parameters=r.of_parameters,
    ),
}
"""Functions that change the number of a record, faster than `dataclasses.replace`."""


def encoded(kind: Kind, number: int) -> int:
    """Return a number from which the kind can be decoded."""
    return number * 3 + KINDS.index(kind)


def renumbered(record: Record, number: int) -> Record:
    """Return a record with another number."""
    return _RENUMBERED[type(record)](record, number)


def same_apart_from_numbers(first: Record, second: Record) -> bool:
    """Whether two records are equal, apart from their numbers and the index of the micro batch that they begin."""
    kind = type(first)
    if kind is not type(second):
        return False
    field = FIELD.get(kind)
    if field is not None:
        return bool(_RENUMBERED[kind](first, 0) == _RENUMBERED[kind](second, 0))
    if isinstance(first, Mark) and isinstance(second, Mark) and first.name.startswith(MICRO_BATCH):
        return second.name.startswith(MICRO_BATCH)
    return first == second
