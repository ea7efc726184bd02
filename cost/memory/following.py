"""Walk of a trace that records every change of its storages, shared by all analyses of memory.

Active memory, requests to the allocator and the contents of blocks are derived from the same storages, of which the
trace of a deep model has hundreds of thousands. So each trace is walked once, instance by instance.
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
"""Types of records that determine the phases of a step and its memory."""
_TOLD: Final = 3
"""Fewest rounds for which some are skipped: the first may use numbers that no other round defines."""


class Seen(NamedTuple):
    """An item of a trace, with its effect on memory.

    Attributes:
        place: index of the item.
        start: sequence number of its first record.
        item: an instance, or a record that affects memory or phase.
        before: bytes that are active before it.
        behind: bytes that are active after it.
        phase: after it.
        effect: of an instance.
        had: the block of a record's storage before it; None where there was none, and for other records.
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
    """Effects of a trace on storages.

    Rounds of which the preceding one had the same effect are skipped.

    Attributes:
        seen: the items that affect memory or phase, in order.
    """

    def __init__(self, trace: Trace) -> None:
        self.seen: list[Seen] = []
        self._held: dict[int, int] = {}
        self._phase: Phase = "other"
        self._active = 0
        self._copies: list[tuple[int, dict[int, int]]] = []
        """Living storages before some of the items: the state at any item is computed from the closest of them."""
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
        """Return the blocks of the storages that are alive before one of the items in :attr:`seen`.

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
        changed = 0  # changes since the last copy of the state: copying costs no more than applying as many changes
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
    """Allocate, resize or free a storage in a table of blocks; return the increase of active bytes.

    Args:
        held: the block of each storage.
        record: the change.
        number: of the storage.
    """
    if isinstance(record, Free):
        return -bytes_of(held.pop(number))
    # A storage that is allocated anew took no memory before.
    before = 0 if isinstance(record, Allocate) else bytes_of(held[number])
    held[number] = block = block_of(record.bytes, record.stream)
    return bytes_of(block) - before
