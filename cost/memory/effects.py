"""Effects of a segment on active memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from legoai.cost.memory.allocator import round_block
from legoai.cost.trace.records import Allocate, Categorise, Free, Kernel, Phase, Resize
from legoai.cost.trace.segments import Instance, Segment, outside_index


class Slots:
    """Slots of storages, whose numbers in an instance are looked up together.

    Attributes:
        slots: those that the segment makes, and then the others.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        found = tuple(slots)
        own = tuple(slot for slot in found if slot >= 0)
        outside = tuple(slot for slot in found if slot < 0)
        self.slots = own + outside
        self._own = _getter([slot // 3 for slot in own])
        self._outside = _getter([outside_index(slot) for slot in outside])

    def numbers(self, instance: Instance) -> tuple[int, ...]:
        """Return the numbers for which the slots stand, in their order."""
        return self._own(instance.own[0]) + self._outside(instance.outside)


def _getter(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function of a sequence that gives what is at some indices."""
    if not indices:
        return lambda _: ()
    if len(indices) == 1:
        (only,) = indices
        return lambda sequence: (sequence[only],)
    return itemgetter(*indices)


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
        sizes: slots of storages that live on, of those that it makes or changes.
        bytes: of these, behind it.
        ended: slots of storages that were there before it and are gone behind it.
    """

    change: int
    most: int
    index: int
    most_phase: Phase
    by_phase: tuple[tuple[Phase, int], ...]
    phase: Phase
    sizes: Slots
    bytes: tuple[int, ...]
    ended: Slots

    def apply(self, instance: Instance, sizes: dict[int, int]) -> None:
        """Let storages of an instance live and end, in a table of their bytes."""
        for number in self.ended.numbers(instance):
            del sizes[number]
        sizes.update(zip(self.sizes.numbers(instance), self.bytes, strict=True))


class MemoryEffects:
    """What a segment does to storages.

    Attributes:
        segment: whose summary this is.
        changed: slots of storages that were there before and end or change their size.
        ended: those of them that are gone behind it.
        survivors: slots of storages that live on, with their allocation, if it is the segment's, and their bytes.
        living: the same slots.
        lives: what is in `survivors` of each of these.
        categories: the records that tell what a storage holds, each with its slot.
        categorised: the slots of these storages.
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
        self.changed = Slots(changed)
        self.ended = Slots(changed.keys() - self.survivors.keys())
        self.living = Slots(self.survivors)
        self.lives = tuple(self.survivors[slot] for slot in self.living.slots)
        self.categories = tuple(categories)
        self.categorised = Slots(dict.fromkeys(slot for _, slot in categories))
        self._effects: dict[tuple[Phase, tuple[int, ...]], Effect] = {}

    def effect(self, before: tuple[int, ...], phase: Phase) -> Effect:
        """Return the effect of an instance, which is computed once for all that begin alike.

        Args:
            before: the bytes of the storages of :attr:`changed`.
            phase: of the record before it.
        """
        key = phase, before
        found = self._effects.get(key)
        if found is None:
            sizes = dict(zip(self.changed.slots, before, strict=True))
            found = self._effects[key] = _effect(self.segment, sizes, phase)
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
    try:
        before = tuple(map(sizes.__getitem__, effects.changed.numbers(instance)))
    except KeyError as error:
        raise ValueError(f"storage {error.args[0]} is not allocated") from error
    return effects.effect(before, phase)


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
    living = Slots(sizes)
    return Effect(
        change=active,
        most=most,
        index=most_index,
        most_phase=most_phase,
        by_phase=tuple(by_phase.items()),
        phase=phase,
        sizes=living,
        bytes=tuple(sizes[slot] for slot in living.slots),
        ended=Slots(outside - sizes.keys()),
    )


def survive(instance: Instance, alive: dict[int, tuple[Allocate, int, Instance | None]]) -> None:
    """Let storages of an instance live and end, in a table of their allocation, bytes, and whose allocation it is."""
    effects = instance.segment.summary(MemoryEffects)
    for number in effects.ended.numbers(instance):
        del alive[number]
    for number, (allocated, size) in zip(effects.living.numbers(instance), effects.lives, strict=True):
        if allocated is not None:
            alive[number] = allocated, size, instance
        else:
            before, _, made_by = alive[number]
            alive[number] = before, size, made_by
