"""Effects of a segment on active memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from legoai.cost.memory.allocator import round_block
from legoai.cost.trace.records import Allocate, Categorise, Free, Kernel, Phase, Resize
from legoai.cost.trace.segments import Instance, Segment


@dataclass(frozen=True, slots=True)
class Effect:
    """What one instance of a segment does to active memory, in bytes, counted from what is active before it.

    Attributes:
        change: what is active more, or less, behind it.
        most: the most that is active while it lasts; 0 where it never is more than before.
        index: the record of the segment at which that is first reached.
        most_phase: the phase of that record.
        by_phase: the most behind each change, by phase.
        phase: in which it ends.
        sizes: slots of storages that live on, of those that it makes or changes, with their new bytes.
        ended: slots of storages that were there before it and are gone behind it.
    """

    change: int
    most: int
    index: int
    most_phase: Phase
    by_phase: tuple[tuple[Phase, int], ...]
    phase: Phase
    sizes: tuple[tuple[int, int], ...]
    ended: tuple[int, ...]

    def apply(self, instance: Instance, sizes: dict[int, int]) -> None:
        """Let storages of an instance live and end, in a table of their bytes."""
        for slot in self.ended:
            del sizes[instance.number(slot)]
        for slot, size in self.sizes:
            sizes[instance.number(slot)] = size


class MemoryEffects:
    """What a segment does to storages.

    Attributes:
        segment: whose summary this is.
        changed: slots of storages that were there before and end or change their size.
        ended: those of them that are gone behind it.
        survivors: slots of storages that live on, with their allocation, if it is the segment's, and their bytes.
        categories: the records that tell what a storage holds, each with its slot.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        made: set[int] = set()
        changed: dict[int, None] = {}
        self.survivors: dict[int, tuple[Allocate | None, int]] = {}
        categories: list[tuple[Categorise, int]] = []
        for record, slot in zip(segment.records, segment.slots, strict=True):
            if isinstance(record, Allocate):
                made.add(slot)
                self.survivors[slot] = record, round_block(record.bytes)
            elif isinstance(record, Free | Resize):
                if slot not in made:
                    changed[slot] = None
                if isinstance(record, Resize):
                    self.survivors[slot] = self.survivors.get(slot, (None, 0))[0], round_block(record.bytes)
                else:
                    self.survivors.pop(slot, None)
            elif isinstance(record, Categorise):
                categories.append((record, slot))
        self.changed = tuple(changed)
        self.ended = changed.keys() - self.survivors.keys()
        self.categories = tuple(categories)
        self._effects: dict[tuple[Phase, tuple[tuple[int, int], ...]], Effect] = {}

    def effect(self, before: tuple[tuple[int, int], ...], phase: Phase) -> Effect:
        """Return the effect of an instance, which is computed once for all that begin alike.

        Args:
            before: the slots of :attr:`changed`, with the bytes of their storages.
            phase: of the record before it.
        """
        key = phase, before
        found = self._effects.get(key)
        if found is None:
            found = self._effects[key] = _effect(self.segment, dict(before), phase)
        return found


def effect_of(instance: Instance, sizes: Mapping[int, int], phase: Phase) -> Effect:
    """Return what an instance does to active memory.

    Args:
        instance: of a segment.
        sizes: bytes of the storages that are there.
        phase: of the record before it.

    Raises:
        ValueError: it names a storage that does not live.
    """
    effects = instance.segment.summary(MemoryEffects)
    before = []
    for slot in effects.changed:
        number = instance.number(slot)
        if number not in sizes:
            raise ValueError(f"storage {number} is not allocated")
        before.append((slot, sizes[number]))
    return effects.effect(tuple(before), phase)


def _effect(segment: Segment, sizes: dict[int, int], phase: Phase) -> Effect:
    outside = frozenset(sizes)
    active = most = most_index = 0
    most_phase = phase
    by_phase: dict[Phase, int] = {}
    for index, (record, slot) in enumerate(zip(segment.records, segment.slots, strict=True)):
        if isinstance(record, Kernel | Allocate):
            phase = record.phase
        if not isinstance(record, Allocate | Free | Resize):
            continue
        size = 0 if isinstance(record, Free) else round_block(record.bytes)
        active += size - sizes.pop(slot, 0)
        if not isinstance(record, Free):
            sizes[slot] = size
        by_phase[phase] = max(by_phase.get(phase, active), active)
        if active > most:
            most, most_index, most_phase = active, index, phase
    return Effect(
        change=active,
        most=most,
        index=most_index,
        most_phase=most_phase,
        by_phase=tuple(by_phase.items()),
        phase=phase,
        sizes=tuple(sizes.items()),
        ended=tuple(outside - sizes.keys()),
    )


def survive(instance: Instance, alive: dict[int, tuple[Allocate, int, Instance | None]]) -> None:
    """Let storages of an instance live and end, in a table of their allocation, bytes, and whose allocation it is."""
    effects = instance.segment.summary(MemoryEffects)
    for slot in effects.ended:
        del alive[instance.number(slot)]
    for slot, (allocated, size) in effects.survivors.items():
        number = instance.number(slot)
        if allocated is not None:
            alive[number] = allocated, size, instance
        else:
            before, _, made_by = alive[number]
            alive[number] = before, size, made_by
