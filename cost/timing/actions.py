"""Timing of pipeline actions: each distinct action is timed once, and simulated as one op.

An action that waits for no other rank always takes the same time. Its ops are timed alone, and then represented by one
:class:`legoai.cost.timing.rank_timeline.ActionOp`. The other ops of a rank stay as they are: sends, receives and the
waits for them, all-gathers that overlap the computation, and what follows the last action.

This is approximate in two ways: a transfer between stages does not slow down a collective within an action by sharing
its link, and an operation that an action leaves running counts as part of the action. A test compares it with the
simulation of every operation of every rank, with which it agrees within 1%.
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
"""Actions whose operations overlap the following ones."""


class StreamEffect:
    """Waits of a segment for work outside it.

    Attributes:
        waits: slots of the collectives that it waits for and does not start.
    """

    def __init__(self, segment: Segment) -> None:
        pairs = zip(segment.records, segment.slots, strict=True)
        self.waits = tuple(slot for record, slot in pairs if isinstance(record, WaitWork) and slot < NONE)


@dataclass(slots=True, kw_only=True)
class ActionTimer:
    """The timed actions of all ranks.

    Attributes:
        cost: of an operation when nothing runs beside it.
        host: that issues them.
        together: the simulated ranks; communication between two of them is never part of an action.
        known: the timed actions by their items.
    """

    cost: Callable[[Timed], Cost]
    host: Host
    together: frozenset[int]
    known: dict[tuple[object, ...], ActionOp | None] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    """Keeps the objects alive whose identity is part of a key of `known`."""

    def compressed(self, items: Sequence[Item], translation: Translation | None = None) -> list[Record | ActionOp]:
        """Replace each action by one op. The marks around actions are kept; those inside are left out.

        Args:
            items: of a rank.
            translation: from the names in its segments to those of the rank. An action keeps the names of its segment.
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
                    return None  # it waits for work that an earlier action left running
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
        """Time some operations alone; None where they involve the host or another rank."""
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
                return None  # it waits for work that an earlier action left running
            if isinstance(record, Kernel | Copy | Collective):
                issued += 1
                seconds += self.host.dispatch(record)
            timed.append(record)
        if not issued:
            return None
        trace = Trace(rank=0, world=1, stage=0, items=tuple(timed))
        at_once = Host(compute_slowdown=self.host.compute_slowdown)
        ahead = simulate(trace, self.cost, at_once)
        latency = ahead.end if self.host == at_once else simulate(trace, self.cost, self.host).end
        return ActionOp(
            stream=0,
            seconds=ahead.end,
            latency=latency,
            host_seconds=seconds,
            intervals=SegmentIntervals(tuple(ahead.intervals)),
        )
