"""Operations of a rank in issue order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.timing.repeats import Anchor
from legoai.cost.timing.runs import Run
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.numbers import FIELD, NONE
from legoai.cost.trace.records import Allocate, Categorise, Free, Kernel, Mark, Record, Resize
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.cost.trace.translation import Translation

Operation: TypeAlias = Record | ActionOp | Run

_ORDERING_MARKS: Final = (ACTION, END_ACTION, BATCH, END_BATCH)
"""Beginnings of the names of marks that affect operations."""
_MEMORY: Final = frozenset({Allocate, Categorise, Free, Resize})
"""Records that take no time."""


class TimedRecords:
    """The records of a segment that take time or order operations.

    Attributes:
        pairs: in order, each with its slot.
    """

    def __init__(self, segment: Segment) -> None:
        both = zip(segment.records, segment.slots, strict=True)
        self.pairs: tuple[tuple[Record | Run, int], ...] = tuple(
            (record, slot) for record, slot in both if type(record) not in _MEMORY
        )

    def named(self, *translations: Translation | None) -> list[tuple[Record | Run, int]]:
        """Return the pairs, with records translated to other names; runs keep the names of their segment."""
        found = list(self.pairs)
        for translation in translations:
            if translation is not None:
                found = [
                    (record if isinstance(record, Run) else translation.record(record), slot) for record, slot in found
                ]
        return found


class RecordsByRun(TimedRecords):
    """The same with kernels joined into runs, and without the marks of modules.

    A run begins with the record that serves as the anchor of the segment.
    """

    def __init__(self, segment: Segment) -> None:
        anchor = segment.summary(Anchor).record
        found: list[tuple[Record | Run, int]] = []
        kernels: list[Kernel] = []

        def end_run() -> None:
            if kernels:
                found.append((Run(tuple(kernels)), NONE))
                kernels.clear()

        for record, slot in zip(segment.records, segment.slots, strict=True):
            if type(record) in _MEMORY:
                continue
            if type(record) is Kernel:
                first = kernels[0] if kernels else record
                if record is anchor or record.stream != first.stream or record.phase != first.phase:
                    end_run()
                kernels.append(record)
            elif not (isinstance(record, Mark) and not record.name.startswith(_ORDERING_MARKS)):
                end_run()
                found.append((record, slot))
        end_run()
        self.pairs = tuple(found)


def operations_of(
    items: Iterable[Item | ActionOp], translation: Translation | None, *, by_run: bool = False
) -> Iterator[tuple[Operation, int]]:
    """Yield the records that take time or order operations, with the number of their collective or event.

    Args:
        items: of a rank.
        translation: from the names in the segments to those of the rank; None where they are the same.
        by_run: whether to join the kernels of segments into runs.
    """
    summary = RecordsByRun if by_run else TimedRecords
    named: dict[tuple[int, int], list[tuple[Record | Run, int]]] = {}
    for item in items:
        kind = type(item)
        if kind is Kernel:
            yield item, NONE  # type: ignore[misc]
        elif isinstance(item, Instance):
            key = id(item.segment), id(item.translation)
            if key not in named:
                named[key] = item.segment.summary(summary).named(item.translation, translation)
            for record, slot in named[key]:
                yield record, NONE if slot == NONE else item.number(slot)
        elif kind not in _MEMORY:
            name = FIELD.get(kind)
            yield item, NONE if name is None else getattr(item, name)
