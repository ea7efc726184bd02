"""Operations of a rank, in the order in which its host comes to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from legoai.cost.timing.rank_timeline import ActionOp
from legoai.cost.trace.numbers import FIELD, NONE
from legoai.cost.trace.records import Allocate, Categorise, Free, Kernel, Record, Resize
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.cost.trace.translation import Translation

Operation: TypeAlias = Record | ActionOp

_MEMORY: Final = frozenset({Allocate, Categorise, Free, Resize})
"""Records that take no time."""


class TimedRecords:
    """The records of a segment that take time or order it.

    Attributes:
        pairs: in their order, each with its slot.
    """

    def __init__(self, segment: Segment) -> None:
        both = zip(segment.records, segment.slots, strict=True)
        self.pairs = tuple((record, slot) for record, slot in both if type(record) not in _MEMORY)

    def named(self, *translations: Translation | None) -> list[tuple[Record, int]]:
        """Return the pairs, the records translated to other names."""
        found = list(self.pairs)
        for translation in translations:
            if translation is not None:
                found = [(translation.record(record), slot) for record, slot in found]
        return found


def operations_of(items: Iterable[Item | ActionOp], translation: Translation | None) -> Iterator[tuple[Operation, int]]:
    """Yield what takes time or orders it, with the number of its collective or event."""
    named: dict[tuple[int, int], list[tuple[Record, int]]] = {}
    for item in items:
        kind = type(item)
        if kind is Kernel:
            yield item, NONE  # type: ignore[misc]
        elif isinstance(item, Instance):
            key = id(item.segment), id(item.translation)
            if key not in named:
                named[key] = item.segment.summary(TimedRecords).named(item.translation, translation)
            for record, slot in named[key]:
                yield record, NONE if slot == NONE else item.number(slot)
        elif kind not in _MEMORY:
            name = FIELD.get(kind)
            yield item, NONE if name is None else getattr(item, name)
