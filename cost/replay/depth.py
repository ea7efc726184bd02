"""Repetition of a block in the trace of a model of few equal blocks.

Wherever a trace passes through the blocks, forwards or backwards, the section of a block in the middle may be repeated
if the sections of two neighbours in the middle are equal. For this comparison every number is described by the block
that defines it, relative to the block that uses it.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from legoai.cost.replay.lists import find_stretched
from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.replay.walk import Unequal, Walk
from legoai.cost.trace.editing import EditableTrace, key_of
from legoai.cost.trace.numbers import KINDS, MAKES, NONE
from legoai.cost.trace.records import Mark, Record
from legoai.cost.trace.translation import in_module

_STORAGE: Final = KINDS.index("storage")


class Made(NamedTuple):
    """Definition of a number.

    Attributes:
        sweep: index of the sweep.
        block: in whose section the number is defined.
        kind: what the defining record has in common with those of other blocks.
        order: index among the definitions of the same kind in the section, counted from the section's end, so that
            additional definitions in one block change nothing.
    """

    sweep: int
    block: int
    kind: int
    order: int


class Place(NamedTuple):
    """A number, expressed by the corresponding number of the middle block.

    Attributes:
        like: the corresponding number of the middle block.
        block: that defines it, among those that were captured.
        from_end: whether that block is counted from the last one.
    """

    like: int
    block: int
    from_end: bool


class BlockRepetition(Walk):
    """Walk of a trace through equal blocks, of which the middle one can be repeated.

    Attributes:
        own: for each record, the block in whose section of a sweep it is; `NONE` between sweeps.
        sweep: for each record, the index of its sweep.
        made: for each number that is defined in a sweep, its definition.
        fixed: numbers that all blocks use, such as a mask that the first block computes for all.
        stretched: storages of vectors with one element per tensor of a list over all blocks: their length, and the
            increase of the length with every further block.

    Raises:
        Unequal: the middle block cannot be repeated.
    """

    def __init__(self, trace: EditableTrace, repeated: RepeatedBlocks) -> None:
        super().__init__(trace, repeated)
        self.made: dict[int, Made] = {}
        self.numbers: dict[Made, int] = {}
        self.fixed: set[int] = set()
        self.relative: set[int] = set()
        self.own = [NONE] * len(trace)
        self.sweep = [NONE] * len(trace)
        self._kinds: dict[object, int] = {}
        self._moved: dict[tuple[int, int], int] = {}
        self._place_numbers()
        for sweep in self.sweeps:
            at = sweep.blocks.index(self.middle)
            before, start, stop = sweep.bounds[at - 1 : at + 2]
            self._compare(before, start, stop, sweep.blocks[at - 1])
        if self.fixed & self.relative:
            raise Unequal
        self.stretched = find_stretched(self)

    @property
    def made_by_middle(self) -> set[int]:
        """The numbers that the middle block defines."""
        return {number for number, made in self.made.items() if made.block == self.middle}

    def storages_of_middle(self) -> set[int]:
        """Return the storages that the middle block allocates, by their numbers in records."""
        return {number // len(KINDS) for number in self.made_by_middle if number % len(KINDS) == _STORAGE}

    def _place_numbers(self) -> None:
        for index, sweep in enumerate(self.sweeps):
            for block, start, stop in zip(sweep.blocks, sweep.bounds, sweep.bounds[1:], strict=False):
                for number, (kind, order) in self._made_between(start, stop, block).items():
                    if number not in self.made:
                        made = Made(index, block, kind, order)
                        self.made[number] = made
                        self.numbers[made] = number
                self.own[start:stop] = [block] * (stop - start)
                self.sweep[start:stop] = [index] * (stop - start)

    def _made_between(self, start: int, stop: int, block: int) -> dict[int, tuple[int, int]]:
        """Return the numbers that the section of a block defines, each with its kind of definition and its order."""
        first: dict[int, Record] = {}
        pairs = zip(self.trace.records[start:stop], self.trace.numbers[start:stop], strict=True)
        for record, number in pairs:
            if isinstance(record, MAKES):
                first.setdefault(number, record)
        counts: Counter[int] = Counter()
        found = {}
        for number in reversed(first):
            kind = self.moved(first[number], block)
            found[number] = kind, counts[kind]
            counts[kind] += 1
        return found

    def _compare(self, before: int, start: int, stop: int, other: int) -> None:
        """Check that the section of the middle block equals that of the block before it."""
        trace = self.trace
        if stop - start != start - before:
            raise Unequal
        for place in range(stop - start):
            one, two = before + place, start + place
            if self.moved(trace.records[one], other) != self.moved(trace.records[two], self.middle):
                raise Unequal
            self._compare_numbers(trace.numbers[one], trace.numbers[two], other)
            first, second = trace.operands[one], trace.operands[two]
            if (first is None) != (second is None):
                raise Unequal
            if first is not None and second is not None:
                pairs = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True)
                for mine, theirs in pairs:
                    self._compare_numbers(mine, theirs, other)

    def _compare_numbers(self, mine: int, theirs: int, other: int) -> None:
        first, second = self.made.get(mine), self.made.get(theirs)
        if mine == theirs:
            if first is not None:
                if abs(first.block - self.middle) <= 1:
                    raise Unequal
                self.fixed.add(mine)
            return
        if first is None or second is None:
            raise Unequal
        if first._replace(block=first.block - other) != second._replace(block=second.block - self.middle):
            raise Unequal
        self.relative |= {mine, theirs}

    def moved(self, record: Record, own: int) -> int:
        """Return what a record has in common with those of other blocks; its module is relative to its own block."""
        key = id(record), own
        found = self._moved.get(key)
        if found is None:
            path = path_of(record)
            block = NONE if path is None else self.block_of(path)
            if path is not None and block != NONE:
                name, _, rest = path[len(self.repeated.prefix) :].partition(".")
                record = _with_path(record, f"{block - own}:{self.order[name]}:{rest}")
            found = self._moved[key] = self._kinds.setdefault(key_of(record), len(self._kinds))
        return found

    def counted_from_end(self, block: int, own: int) -> bool:
        """Whether a block that is named in the section of another one, or between sweeps, is counted from the last."""
        # Blocks that are farther apart are not related by their distance.
        near = own != NONE and abs(block - own) <= self.middle
        return (own if near else block) > self.middle

    def place_of(self, number: int, own: int) -> Place | None:
        """Return the place of a number that the section of a block uses; None where all blocks use the same number.

        Args:
            number: of the trace.
            own: the block; `NONE` between sweeps.

        Raises:
            Unequal: the corresponding number in a deeper model is not known.
        """
        made = self.made.get(number)
        if made is None or number in self.fixed:
            return None
        like = self.numbers.get(made._replace(block=self.middle))
        from_end = self.counted_from_end(made.block, own)
        if like is None:
            if own == self.middle or from_end != (made.block > self.middle):
                raise Unequal
            return None
        if own == self.middle:
            ahead = made.block > own
            for block in range(own + 1, made.block + 1) if ahead else range(made.block, own + 1):
                if self.numbers.get(made._replace(block=block), NONE) in {NONE, *self.fixed}:
                    raise Unequal
        return Place(like, made.block, from_end)


def path_of(record: Record) -> str | None:
    """Return the path of the module that a record names."""
    if isinstance(record, Mark):
        head, _, path = record.name.partition(" ")
        return path if head in ("forward", "end") and not path.startswith("step ") else None
    return getattr(record, "module", None)


def _with_path(record: Record, path: str) -> Record:
    """Return a record of another module."""
    if isinstance(record, Mark):
        return Mark(f"{record.name.partition(' ')[0]} {path}")
    return in_module(record, path)
