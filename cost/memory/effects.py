"""Effects of a segment on storages and active memory.

The block of a storage is one integer: its bytes, as the allocator rounds them, in the high bits, and its stream in the
low ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple

from legoai.cost.trace.records import Allocate, Categorise, Free, Kernel, Phase, Resize
from legoai.cost.trace.segments import Instance, Segment, outside_index
from legoai.specs.allocator import round_block

_STREAM_BITS: Final = 16
"""Width of the stream in a block's number; the bytes are above it."""
_STREAM: Final = 2**_STREAM_BITS - 1


def block_of(size: int, stream: int) -> int:
    """Return the block that serves a request of some bytes on a stream."""
    return round_block(size) << _STREAM_BITS | stream


def bytes_of(block: int) -> int:
    """Return the bytes of a block."""
    return block >> _STREAM_BITS


def stream_of(block: int) -> int:
    """Return the stream of a block."""
    return block & _STREAM


class Slots:
    """Slots of storages whose numbers in an instance are looked up together.

    Attributes:
        slots: those that the segment defines, followed by the others.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        found = tuple(slots)
        own = tuple(slot for slot in found if slot >= 0)
        outside = tuple(slot for slot in found if slot < 0)
        self.slots = own + outside
        self._own = _getter([slot // 3 for slot in own])
        self._outside = _getter([outside_index(slot) for slot in outside])

    def numbers(self, instance: Instance) -> tuple[int, ...]:
        """Return the numbers of the slots in an instance, in order."""
        return self._own(instance.own[0]) + self._outside(instance.outside)


def _getter(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function that returns the items of a sequence at some indices."""
    if not indices:
        return lambda _: ()
    if len(indices) == 1:
        (only,) = indices
        return lambda sequence: (sequence[only],)
    return itemgetter(*indices)


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one instance of a segment on active memory, in bytes relative to what is active before it.

    Attributes:
        change: increase of active memory after the instance.
        most: maximum increase during the instance; 0 where it never exceeds the start.
        index: the record of the segment at which that maximum is first reached.
        most_phase: the phase of that record.
        by_phase: maximum increase after each change, by phase.
        phase: in which it ends.
        before: blocks before the instance of storages that existed before it and end or are resized by it.
        living: slots of the storages that it allocates or resizes and that are alive after it.
        blocks: the blocks of these after it.
        ended: slots of storages that existed before it and that it frees.
    """

    change: int
    most: int
    index: int
    most_phase: Phase
    by_phase: tuple[tuple[Phase, int], ...]
    phase: Phase
    before: tuple[int, ...]
    living: Slots
    blocks: tuple[int, ...]
    ended: Slots

    def apply(self, instance: Instance, held: dict[int, int]) -> None:
        """Update a table of the blocks of living storages by an instance."""
        for number in self.ended.numbers(instance):
            del held[number]
        held.update(zip(self.living.numbers(instance), self.blocks, strict=True))


class _Change(NamedTuple):
    """Effect of one record on a storage.

    Attributes:
        record: its index in the segment.
        slot: of the storage.
        block: of the storage after the record; None where it is freed.
        phase: of the record; None for the phase in which the segment begins.
    """

    record: int
    slot: int
    block: int | None
    phase: Phase | None


class MemoryEffects:
    """Effects of a segment on storages.

    Attributes:
        changes: of its storages, in order.
        changed: slots of storages that existed before and are freed or resized.
        survivors: slots of storages that are alive afterwards, with their allocation, if the segment has it, and bytes.
        categories: the records that categorise a storage, each with its slot.
        categorised: the slots of these storages, of those that the segment does not define.
    """

    def __init__(self, segment: Segment) -> None:
        made: set[int] = set()
        changed: dict[int, None] = {}
        self.survivors: dict[int, tuple[Allocate | None, int]] = {}
        self.changes: list[_Change] = []
        categories: list[tuple[Categorise, int]] = []
        phase: Phase | None = None
        for index, (record, slot) in enumerate(zip(segment.records, segment.slots, strict=True)):
            kind = type(record)
            if kind is Kernel:
                phase = record.phase  # type: ignore[union-attr]
            elif isinstance(record, Allocate):
                phase = record.phase
                made.add(slot)
                block = block_of(record.bytes, record.stream)
                self.survivors[slot] = record, bytes_of(block)
                self.changes.append(_Change(index, slot, block, phase))
            elif kind is Free or kind is Resize:
                if slot not in made:
                    changed[slot] = None
                if isinstance(record, Resize):
                    block = block_of(record.bytes, record.stream)
                    self.survivors[slot] = self.survivors.get(slot, (None, 0))[0], bytes_of(block)
                    self.changes.append(_Change(index, slot, block, phase))
                else:
                    self.survivors.pop(slot, None)
                    self.changes.append(_Change(index, slot, None, phase))
            elif isinstance(record, Categorise):
                categories.append((record, slot))
        self._last = phase
        self.changed = Slots(changed)
        self.categories = tuple(categories)
        self.categorised = Slots(dict.fromkeys(slot for _, slot in categories if slot < 0))
        self._effects: dict[tuple[Phase, tuple[int, ...]], Effect] = {}

    def effect(self, before: tuple[int, ...], phase: Phase) -> Effect:
        """Return the effect of an instance; computed once for all instances with the same start.

        Args:
            before: the blocks of the storages of :attr:`changed`.
            phase: of the preceding record.
        """
        key = phase, before
        found = self._effects.get(key)
        if found is None:
            found = self._effects[key] = _effect(self.changes, self._last, self.changed.slots, before, phase)
        return found


def effect_of(instance: Instance, held: Mapping[int, int], phase: Phase) -> Effect:
    """Return the effect of an instance on active memory.

    Args:
        instance: of a segment.
        held: blocks of the living storages.
        phase: of the preceding record.

    Raises:
        ValueError: the instance uses a storage that is not alive.
    """
    effects = instance.segment.summary(MemoryEffects)
    try:
        before = tuple(map(held.__getitem__, effects.changed.numbers(instance)))
    except KeyError as error:
        raise ValueError(f"storage {error.args[0]} is not allocated") from error
    return effects.effect(before, phase)


def _effect(
    changes: Sequence[_Change], last: Phase | None, slots: Sequence[int], before: tuple[int, ...], begun: Phase
) -> Effect:
    held = dict(zip(slots, before, strict=True))
    active = most = most_index = 0
    most_phase = begun
    by_phase: dict[Phase, int] = {}
    for index, slot, block, in_phase in changes:
        phase = in_phase or begun
        active -= bytes_of(held.pop(slot, 0))
        if block is not None:
            held[slot] = block
            active += bytes_of(block)
        if by_phase.get(phase, active) <= active:
            by_phase[phase] = active
        if active > most:
            most, most_index, most_phase = active, index, phase
    living = Slots(held)
    return Effect(
        change=active,
        most=most,
        index=most_index,
        most_phase=most_phase,
        by_phase=tuple(by_phase.items()),
        phase=last or begun,
        before=before,
        living=living,
        blocks=tuple(held[slot] for slot in living.slots),
        ended=Slots(slot for slot in slots if slot not in held),
    )
