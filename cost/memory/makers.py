"""Operators that allocate the storages of a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from legoai.cost.trace.records import Allocate, Collective, Copy, HostKernel, Kernel, Record
from legoai.cost.trace.segments import Instance, Segment
from legoai.cost.trace.trace import Trace


class SegmentMakers:
    """The operators that allocate the storages of a segment, by slot."""

    def __init__(self, segment: Segment) -> None:
        self.by_slot = dict(_makers(zip(segment.records, segment.slots, strict=True)))


def makers(trace: Trace, by_instance: Collection[tuple[int, Instance, int]]) -> dict[int, str]:
    """Return the operators that allocate storages: of those outside of segments all, of others the asked.

    Args:
        trace: of one rank.
        by_instance: storages that instances of segments allocate, each with the instance and the storage's slot.
    """
    alone = (
        (item, item.storage if isinstance(item, Allocate) else 0)
        for item in trace.items
        if not isinstance(item, Instance)
    )
    found = dict(_makers(alone))
    for number, instance, slot in by_instance:
        found[number] = instance.segment.summary(SegmentMakers).by_slot.get(slot, "")
    return found


def _makers(records: Iterable[tuple[Record, int]]) -> Iterator[tuple[int, str]]:
    """Yield the number of each allocated storage, and the operator: an operator's outputs are allocated before it."""
    waiting: list[int] = []
    for record, number in records:
        if isinstance(record, Allocate):
            waiting.append(number)
        elif isinstance(record, Kernel | HostKernel | Collective | Copy):
            name = record.op if isinstance(record, Kernel | HostKernel) else _name(record)
            yield from ((one, name) for one in waiting)
            waiting.clear()


def _name(record: Collective | Copy) -> str:
    return record.kind if isinstance(record, Collective) else "copy"
