"""Actions of a pipeline's rank, each timed once and put in the place of its ops.

An action that waits for no other rank takes the same time whenever it is taken. Its ops are timed alone, and then
stand as one :class:`legoai.cost.timing.rank_timeline.ActionOp` among what its rank does with others: sends, receives
and the waits for them, the gathering of parameters beside the computation, and what follows the last action.

Two things are lost: a transfer between stages does not slow down a collective inside of an action by taking its link,
and an operation that an action leaves running is counted to its end. The test of both is the simulation of every
operation of every rank, with which this one agrees within 1%.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from legoai.cost.timing.engine import simulate
from legoai.cost.timing.intervals import SegmentIntervals
from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.timing.timeline import Cost, Host, Timed
from legoai.cost.trace.marks import ACTION, END_ACTION
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import (
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
    WaitEvent,
    WaitWork,
)
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.cost.trace.trace import Trace, records_of
from legoai.cost.trace.translation import Translation

_BESIDE = ("UNSHARD", "RESHARD")
"""Actions whose operations run beside the next ones."""


class StreamEffect:
    """What a segment has to do with streams beyond it.

    Attributes:
        waits: slots of the collectives for which it waits and which it does not start.
    """

    def __init__(self, segment: Segment) -> None:
        pairs = zip(segment.records, segment.slots, strict=True)
        self.waits = tuple(slot for record, slot in pairs if isinstance(record, WaitWork) and slot < NONE)


@dataclass(slots=True, kw_only=True)
class ActionTimer:
    """The actions that were timed, of any rank.

    Attributes:
        cost: of an operation when nothing runs beside it.
        host: that issues them.
        together: the ranks that are simulated: what two of them do together is never part of an action.
        known: the timed actions by what they are made of.
    """

    cost: Callable[[Timed], Cost]
    host: Host
    together: frozenset[int]
    known: dict[tuple[object, ...], ActionOp | None] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    """What the keys of `known` name by identity."""

    def compressed(self, items: Sequence[Item], translation: Translation | None = None) -> list[Record | ActionOp]:
        """Put one op in the place of each action. The marks around them stay; those inside are left out.

        Args:
            items: of a rank.
            translation: from the names in its segments to those that are meant. An action keeps those of its segment.
        """
        result: list[Record | ActionOp] = []
        place = 0
        while place < len(items):
            item = items[place]
            result += records_of([item], translation)
            place += 1
            if not (isinstance(item, Mark) and item.name.startswith(ACTION)) or item.name.endswith(_BESIDE):
                continue
            end = Mark(END_ACTION + item.name.removeprefix(ACTION))
            stop = items.index(end, place)
            inside = items[place:stop]
            op = self._action(inside)
            if op is None:
                result += records_of(inside, translation)
            else:
                result.append(op)
            place = stop
        return result

    def _action(self, items: Sequence[Item]) -> ActionOp | None:
        works: dict[int, None] = {}
        events: dict[int, None] = {}
        key: list[object] = []
        for item in items:
            if isinstance(item, Instance):
                works.update(dict.fromkeys(item.own[1]))
                events.update(dict.fromkeys(item.own[2]))
                waited = [item.number(slot) for slot in item.segment.summary(StreamEffect).waits]
                if not works.keys() >= set(waited):
                    return None  # on what an earlier action left running
                order = list(works) if waited else []
                key.append((id(item.segment), *map(order.index, waited)))
            elif isinstance(item, Kernel | Copy):
                key.append(id(item))
            elif isinstance(item, Collective):
                works[item.work] = None
                key.append((item.kind, item.ranks, item.bytes, item.stream))
            elif isinstance(item, RecordEvent):
                events[item.event] = None
                key.append((RecordEvent, item.stream))
            elif isinstance(item, WaitEvent | WaitWork):
                key.append((type(item), item.stream))
        told = tuple(key)
        if told not in self.known:
            self.kept.append(items)
            self.known[told] = self._timed(list(records_of(items)), set(works))
        op = self.known[told]
        if op is None:
            return None
        return dataclasses.replace(op, works=tuple(works), events=tuple(events))

    def _timed(self, records: Sequence[Record], works: set[int]) -> ActionOp | None:
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
        trace = Trace(rank=0, world=1, stage=0, items=tuple(timed))
        at_once = dataclasses.replace(self.host, dispatch_seconds=0.0, python_seconds=None)
        ahead = simulate(trace, self.cost, at_once)
        latency = ahead.end if self.host == at_once else simulate(trace, self.cost, self.host).end
        return ActionOp(
            stream=0,
            seconds=ahead.end,
            latency=latency,
            host_seconds=seconds,
            intervals=SegmentIntervals(tuple(ahead.intervals)),
        )
