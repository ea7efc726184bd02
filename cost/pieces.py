"""How are the actions of a pipeline's rank timed once each, and put in the place of their operations?

An action that waits for no other rank takes the same time whenever it is taken. Its operations are timed alone, and
then stand as one :class:`legoai.cost.ranks.Piece` among what its rank does with others: sends, receives and the waits
for them, the gathering of parameters beside the computation, and what follows the last action.

Two things are lost: a transfer between stages does not slow down a collective inside of an action by taking its link,
and an operation that an action leaves running is counted to its end. The test of both is the simulation of every
operation of every rank, with which this one agrees within 1%.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from legoai.cost.marks import ACTION, END_ACTION
from legoai.cost.ranks import Piece
from legoai.cost.timeline import Cost, Host, Timed, simulate
from legoai.cost.trace import (
    Collective,
    Copy,
    HostKernel,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    Record,
    RecordEvent,
    Trace,
    WaitEvent,
    WaitWork,
)

_BESIDE = ("UNSHARD", "RESHARD")
"""Actions whose operations run beside the next ones."""


@dataclass(slots=True, kw_only=True)
class Pieces:
    """The actions that were timed, of any rank.

    Attributes:
        cost: of an operation when nothing runs beside it.
        host: that issues them.
        together: the ranks that are simulated: what two of them do together is never part of a piece.
        known: the pieces by what they are made of.
    """

    cost: Callable[[Timed], Cost]
    host: Host
    together: frozenset[int]
    known: dict[tuple[object, ...], Piece | None] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    """What the keys of `known` name by identity."""

    def compressed(self, records: Sequence[Record]) -> list[Record | Piece]:
        """Put pieces in the place of actions. The marks around them stay; those inside are left out."""
        result: list[Record | Piece] = []
        place = 0
        while place < len(records):
            record = records[place]
            result.append(record)
            place += 1
            if not (isinstance(record, Mark) and record.name.startswith(ACTION)) or record.name.endswith(_BESIDE):
                continue
            end = Mark(END_ACTION + record.name.removeprefix(ACTION))
            stop = records.index(end, place)
            inside = records[place:stop]
            piece = self._piece(inside)
            if piece is None:
                result += inside
            else:
                result.append(piece)
            place = stop
        return result

    def _piece(self, records: Sequence[Record]) -> Piece | None:
        works: list[int] = []
        events: list[int] = []
        key: list[object] = []
        for record in records:
            if isinstance(record, Kernel | Copy):
                key.append(id(record))
            elif isinstance(record, Collective):
                works.append(record.work)
                key.append((record.kind, record.ranks, record.bytes, record.stream))
            elif isinstance(record, RecordEvent):
                events.append(record.event)
                key.append((RecordEvent, record.stream))
            elif isinstance(record, WaitEvent | WaitWork):
                key.append((type(record), record.stream))
        told = tuple(key)
        if told not in self.known:
            self.kept.append(records)
            self.known[told] = self._timed(records, set(works))
        piece = self.known[told]
        if piece is None:
            return None
        return dataclasses.replace(piece, works=tuple(works), events=tuple(events))

    def _timed(self, records: Sequence[Record], works: set[int]) -> Piece | None:
        """Time some operations alone; None where the host or another rank has a part in them."""
        timed: list[Record] = []
        issued, seconds = 0, 0.0
        for record in records:
            if isinstance(record, HostWaitDevice | HostWaitEvent | HostWaitStream | HostKernel):
                return None
            if isinstance(record, Copy) and record.blocking:
                return None
            if isinstance(record, Collective) and len(self.together.intersection(record.ranks)) > 1:
                return None
            if isinstance(record, WaitWork) and record.work not in works:
                return None  # on what an earlier action left running
            if isinstance(record, Kernel | Copy | Collective):
                issued += 1
                seconds += self.host.dispatch(record)
            timed.append(record)
        if not issued:
            return None
        trace = Trace(rank=0, world=1, stage=0, records=tuple(timed))
        ahead = simulate(trace, self.cost, dataclasses.replace(self.host, dispatch_seconds=0.0))
        latency = ahead.end if not self.host.dispatch_seconds else simulate(trace, self.cost, self.host).end
        return Piece(
            stream=0,
            seconds=ahead.end,
            latency=latency,
            host_seconds=seconds,
            intervals=ahead.intervals,
        )
