"""What does a part of a trace that is used often do to memory, each time?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from legoai.cost.memory.allocator import round_block
from legoai.cost.trace.records import Allocate, Categorise, Free, Kernel, Phase, Record, Resize
from legoai.cost.trace.segments import Part, Use


@dataclass(frozen=True, slots=True)
class Effect:
    """What one use of a part does to active memory, in bytes, counted from what is active before it.

    Attributes:
        change: what is active more, or less, behind it.
        most: the most that is active while it lasts; 0 where it never is more than before.
        place: the record of the part at which that is first reached.
        most_phase: the phase of that record.
        by_phase: the most behind each change, by phase.
        phase: in which it ends.
        sizes: slots of storages that live on, of those that it makes or changes, with their new bytes.
        ended: slots of storages that were there before it and are gone behind it.
    """

    change: int
    most: int
    place: int
    most_phase: Phase
    by_phase: tuple[tuple[Phase, int], ...]
    phase: Phase
    sizes: tuple[tuple[int, int], ...]
    ended: tuple[int, ...]

    def apply(self, use: Use, sizes: dict[int, int]) -> None:
        """Let storages of a use live and end, in a table of their bytes."""
        for slot in self.ended:
            del sizes[use.number(slot)]
        for slot, size in self.sizes:
            sizes[use.number(slot)] = size


def effect_of(use: Use, sizes: Mapping[int, int], phase: Phase) -> Effect:
    """Return what a use does, which is found out once for all uses of a part that begin alike.

    Args:
        use: of a part.
        sizes: bytes of the storages that are there.
        phase: in which the record before it was.

    Raises:
        ValueError: the part names a storage that does not live.
    """
    before = []
    for slot in changed_by(use.part):
        number = use.number(slot)
        if number not in sizes:
            raise ValueError(f"storage {number} is not allocated")
        before.append((slot, sizes[number]))
    key = "effect", phase, tuple(before)
    found: Effect | None = use.part.known.get(key)
    if found is None:
        found = use.part.known[key] = _effect(use.part, dict(before), phase)
    return found


def _effect(part: Part, sizes: dict[int, int], phase: Phase) -> Effect:
    outside = frozenset(sizes)
    active = most = place = 0
    most_phase = phase
    by_phase: dict[Phase, int] = {}
    for index, (record, slot) in enumerate(zip(part.records, part.slots, strict=True)):
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
            most, place, most_phase = active, index, phase
    return Effect(
        change=active,
        most=most,
        place=place,
        most_phase=most_phase,
        by_phase=tuple(by_phase.items()),
        phase=phase,
        sizes=tuple(sizes.items()),
        ended=tuple(outside - sizes.keys()),
    )


def changed_by(part: Part) -> tuple[int, ...]:
    """Return the slots of storages that were there before and end or change their size."""
    found: tuple[int, ...] | None = part.known.get("changed")
    if found is None:
        made: set[int] = set()
        changed: dict[int, None] = {}
        for record, slot in zip(part.records, part.slots, strict=True):
            if isinstance(record, Allocate):
                made.add(slot)
            elif isinstance(record, Free | Resize) and slot not in made:
                changed[slot] = None
        found = part.known["changed"] = tuple(changed)
    return found


def survive(use: Use, alive: dict[int, tuple[Allocate, int]]) -> None:
    """Let storages of a use live and end, in a table of their allocation and bytes."""
    found: tuple[dict[int, tuple[Allocate | None, int]], set[int]] | None = use.part.known.get("survivors")
    if found is None:
        made: dict[int, tuple[Allocate | None, int]] = {}
        for record, slot in zip(use.part.records, use.part.slots, strict=True):
            if isinstance(record, Allocate):
                made[slot] = record, round_block(record.bytes)
            elif isinstance(record, Resize):
                made[slot] = made.get(slot, (None, 0))[0], round_block(record.bytes)
            elif isinstance(record, Free):
                made.pop(slot, None)
        ended = set(changed_by(use.part)) - made.keys()
        found = use.part.known["survivors"] = made, ended
    for slot in found[1]:
        del alive[use.number(slot)]
    for slot, (allocated, size) in found[0].items():
        number = use.number(slot)
        alive[number] = allocated if allocated is not None else alive[number][0], size


def categories_of(part: Part) -> tuple[tuple[Categorise, int], ...]:
    """Return the records of a part that tell what a storage holds, each with its slot."""
    found: tuple[tuple[Categorise, int], ...] | None = part.known.get("categories")
    if found is None:
        pairs: zip[tuple[Record, int]] = zip(part.records, part.slots, strict=True)
        found = tuple((record, slot) for record, slot in pairs if isinstance(record, Categorise))
        part.known["categories"] = found
    return found
