"""Storages of a trace, followed once for all that is told of them.

What is active, what the allocator is asked for and what blocks hold is told of the same storages, of which a trace of
many blocks has hundreds of thousands. So they are followed once for each trace, instance by instance.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from legoai.cost.memory.effects import Effect, block_of, bytes_of, effect_of
from legoai.cost.trace.records import Allocate, Free, Kernel, Mark, Phase, Resize
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.trace import Trace, length

_TELLING: Final[AbstractSet[type]] = {Allocate, Free, Kernel, Mark, Resize}
"""Records from which the phases of a step and its memory are told."""
_TOLD: Final = 3
"""Rounds from which on some may be left out: the first names what was not made by one like it."""


class Seen(NamedTuple):
    """An item of a trace, with what it does to memory.

    Attributes:
        place: index of the item.
        start: sequence number of its first record.
        item: an instance, or a record from which something is told.
        before: bytes that are active before it.
        behind: behind it.
        phase: behind it.
        effect: of an instance.
        had: the block of a record's storage before it; None where there was none, and of other records.
    """

    place: int
    start: int
    item: Item
    before: int
    behind: int
    phase: Phase
    effect: Effect | None
    had: int | None


class Followed:
    """What a trace does to storages.

    Rounds that find what the one before them found are left out: they do the same.

    Attributes:
        seen: the items from which something is told, in their order.
    """

    def __init__(self, trace: Trace) -> None:
        self.seen: list[Seen] = []
        self._held: dict[int, int] = {}
        self._phase: Phase = "other"
        self._active = 0
        self._copies: list[tuple[int, dict[int, int]]] = []
        """What is there before some of them, from which it is told anywhere without following all before it."""
        items, rounds = trace.items, trace.rounds
        starts = list(itertools.accumulate(map(length, items), initial=0))
        if rounds is None or rounds.count < _TOLD:
            self._follow(items, starts, range(len(items)))
            return
        self._follow(items, starts, range(rounds.first))
        before: dict[int, int] = {}
        for done in range(rounds.count):
            moved = rounds.moved(before, self._held, 1) if done >= _TOLD - 1 else None
            if moved is not None:
                for number in moved:
                    self._held[number + rounds.shift * (rounds.count - done)] = self._held.pop(number)
                break
            before = dict(self._held)
            begin = rounds.first + done * rounds.length
            self._follow(items, starts, range(begin, begin + rounds.length))
        self._follow(items, starts, range(rounds.stop, len(items)))

    def held_before(self, place: int) -> dict[int, int]:
        """Return the blocks of the storages that are there before one of the items that were seen.

        Args:
            place: index among :attr:`seen`.
        """
        begin, copied = self._copies[bisect_right(self._copies, place, key=lambda pair: pair[0]) - 1]
        held = dict(copied)
        for one in self.seen[begin:place]:
            if one.effect is not None:
                assert isinstance(one.item, Instance)
                one.effect.apply(one.item, held)
            elif isinstance(one.item, Allocate | Free | Resize):
                change(held, one.item, one.item.storage)
        return held

    def _follow(self, items: Sequence[Item], starts: Sequence[int], places: range) -> None:
        """Follow some items."""
        held, seen, active, phase = self._held, self.seen, self._active, self._phase
        self._copies.append((len(seen), dict(held)))
        changed = 0  # since then: no more is copied than changes
        for place in places:
            item = items[place]
            kind = type(item)
            effect, had, before = None, None, active
            if isinstance(item, Instance):
                effect = effect_of(item, held, phase)
                active += effect.change
                phase = effect.phase
                effect.apply(item, held)
            elif kind not in _TELLING:
                continue
            elif isinstance(item, Allocate | Free | Resize):
                had = held.get(item.storage)
                if had is None and not isinstance(item, Allocate):
                    raise ValueError(f"storage {item.storage} is not allocated")
                active += change(held, item, item.storage)
                phase = item.phase if isinstance(item, Allocate) else phase
            elif isinstance(item, Kernel):
                phase = item.phase
            seen.append(Seen(place, starts[place], item, before, active, phase, effect, had))
            changed += 1 if effect is None else len(effect.blocks)
            if changed > len(held):
                self._copies.append((len(seen), dict(held)))
                changed = 0
        self._active, self._phase = active, phase


def change(held: dict[int, int], record: Allocate | Free | Resize, number: int) -> int:
    """Let a storage live, change its size or end, in a table of blocks; return how many more bytes are active.

    Args:
        held: the block of each storage.
        record: which says so.
        number: of the storage.
    """
    if isinstance(record, Free):
        return -bytes_of(held.pop(number))
    # One that is made anew has taken nothing before.
    before = 0 if isinstance(record, Allocate) else bytes_of(held[number])
    held[number] = block = block_of(record.bytes, record.stream)
    return bytes_of(block) - before
