"""Extension of the trace of a model of few equal blocks to one of many.

Wherever a trace goes through the blocks, in order or against it, the part of one block in the middle is repeated. That
is right if the parts of two neighbours in the middle are equal, once every number is told by the block that made it,
and counted from the block that names it. Between them, kernels that take the tensors of all blocks as a list get a
longer list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Final, NamedTuple

from legoai.cost.replay.blocks import RepeatedBlocks
from legoai.cost.replay.lists import Lists
from legoai.cost.replay.walk import Unequal
from legoai.cost.trace.editing import EditableTrace, Section
from legoai.cost.trace.numbers import NONE, alike
from legoai.cost.trace.records import Allocate, Collective, Free, Kernel, Mark, Record, Resize
from legoai.cost.trace.translation import Translation, in_module

_FAR: Final = 2
"""Blocks that are farther apart than this have nothing to do with each other in particular."""


class _Made(NamedTuple):
    """Where a number was made: in which sweep, in whose part, as which, counted from the part's end."""

    sweep: int
    block: int
    order: int


def lengthen(trace: EditableTrace, repeated: RepeatedBlocks, *, last: bool = True) -> EditableTrace | None:
    """Return the trace of the model with all of its repeated blocks; None where they are not equal.

    Args:
        trace: with the operands of all kernels.
        repeated: blocks some of which were left out.
        last: whether no others follow, so that the operands are not needed any more.
    """
    if not repeated.missing:
        return trace
    try:
        return _Lengthening(trace.spelled_out(), repeated, keep_operands=not last).result()
    except Unequal:
        return None


class _Lengthening(Lists):
    def __init__(self, trace: EditableTrace, repeated: RepeatedBlocks, *, keep_operands: bool = False) -> None:
        super().__init__(trace, repeated)
        self.keep_operands = keep_operands
        self.renamed_path = functools.cache(self._renamed_path)
        self.made: dict[int, _Made] = {}
        self.numbers: dict[_Made, int] = {}
        self.fixed: set[int] = set()
        """Numbers that all blocks name, as of a mask that the first block computes for all."""
        self.relative: set[int] = set()
        self.stretched = self.find_stretched()
        self.own: list[int] = [NONE] * len(trace)
        self._place_numbers()
        self.copies = self._number_copies()
        self.shared: dict[tuple[int, int], Record] = {}
        self.translations: dict[int, Translation] = {}

    def _renamed_path(self, path: str, block: int) -> str:
        """Return the path of a module of a block as that of another block of the whole model."""
        rest = path[len(self.repeated.prefix) :].partition(".")[2]
        return f"{self.repeated.prefix}{self.repeated.names[block]}{'.' if rest else ''}{rest}"

    def _place_numbers(self) -> None:
        for index, sweep in enumerate(self.sweeps):
            for block, start, stop in zip(sweep.blocks, sweep.bounds, sweep.bounds[1:], strict=False):
                found = self.trace.made(start, stop)
                for number, order in found.items():
                    if number not in self.made:
                        made = _Made(index, block, order - len(found))
                        self.made[number] = made
                        self.numbers[made] = number
                self.own[start:stop] = [block] * (stop - start)

    def result(self) -> EditableTrace:
        """Return the lengthened trace."""
        for sweep in self.sweeps:
            place = sweep.blocks.index(self.middle)
            before, start, stop = sweep.bounds[place - 1 : place + 2]
            self._compare(before, start, stop, sweep.blocks[place - 1])
        if self.fixed & self.relative:
            raise Unequal
        result = EditableTrace([], [], [])
        at = 0
        for sweep in self.sweeps:
            place = sweep.blocks.index(self.middle)
            forward = sweep.blocks[place + 1] > self.middle
            start, stop = sweep.bounds[place], sweep.bounds[place + 1]
            part = self.trace.part(start, stop)
            insert = stop if forward else start
            self._copy_range(result, at, insert)
            news = range(self.middle + 1, self.middle + 1 + self.missing)
            self._repeat(result, part, news if forward else reversed(news))
            at = insert
        self._copy_range(result, at, len(self.trace))
        self._check(result)
        return result

    def _check(self, result: EditableTrace) -> None:
        """Check that all that is named was made, and that the missing blocks free what the middle one does."""
        made: set[int] = set()
        for record, number in zip(result.records, result.numbers, strict=True):
            if isinstance(record, Allocate | Collective):
                made.add(number)
            elif number != NONE and number % 3 != 2 and number not in made:
                raise Unequal
        ours = {number for number, place in self.made.items() if place.block == self.middle}
        kept = _living(self.trace)
        if len(_living(result)) != len(kept) + self.missing * len(kept & ours):
            raise Unequal

    def _compare(self, before: int, start: int, stop: int, other: int) -> None:
        """Check that the part of the middle block is equal to that of the one before it."""
        trace = self.trace
        if stop - start != start - before:
            raise Unequal
        for place in range(stop - start):
            one, two = before + place, start + place
            if not alike(self._moved(trace.records[one], other), self._moved(trace.records[two], self.middle)):
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

    def _moved(self, record: Record, own: int) -> Record:
        """Return a record with its module told from its own block."""
        path = _path_of(record)
        if path is None:
            return record
        block = self.block_of(path)
        if block == NONE:
            return record
        rest = path[len(self.repeated.prefix) :].partition(".")[2]
        return _with_path(record, f"{block - own}:{rest}")

    def _target(self, own: int, block: int) -> int:
        """Return the block of the whole model that a kept one stands for, where another one names it."""
        if own == NONE or abs(block - own) > _FAR:
            return block if block <= self.middle else block + self.missing
        return block if own <= self.middle else block + self.missing

    def _number(self, made: _Made, block: int) -> int:
        """Return the number of what was made for a block of the whole model."""
        kept = block if block <= self.middle else block - self.missing
        if block <= self.middle or kept > self.middle:
            found = self.numbers.get(made._replace(block=kept))
            if found is None:
                raise Unequal
            return found
        base, size, orders = self.copies[made.sweep]
        place = orders.get(made.order)
        if place is None:
            raise Unequal
        number, kind = place
        return (base + (block - self.middle - 1) * size + number) * 3 + kind

    def _number_copies(self) -> list[tuple[int, int, dict[int, tuple[int, int]]]]:
        """Set numbers aside for what the missing blocks make.

        Returns:
            For each sweep the first number of the first missing block, how many each block has, and the place among
            them and the kind of each thing that a block makes.
        """
        base = max(self.trace.numbers, default=0) // 3 + 1
        found = []
        for index, sweep in enumerate(self.sweeps):
            place = sweep.blocks.index(self.middle)
            made = self.trace.made(sweep.bounds[place], sweep.bounds[place + 1])
            orders = {
                self.made[number].order: (order, number % 3)
                for order, number in enumerate(made)
                if self.made[number].sweep == index
            }
            found.append((base, len(made), orders))
            base += len(made) * self.missing
        return found

    def _copy_range(self, result: EditableTrace, start: int, stop: int) -> None:
        """Append records as they are, with names and numbers of the whole model."""
        trace = self.trace
        result.sections += trace.sections_between(start, stop, len(result) - start)
        for index in range(start, stop):
            own, used = self.own[index], trace.operands[index]
            name = functools.partial(self._renumbered, own)
            record = self._renamed(trace.records[index], own)
            number = trace.numbers[index]
            if used is not None and isinstance(record, Kernel):
                record, used = self.widened(record, used, name)
            if isinstance(record, Allocate) and number in self.stretched:
                short, long = self.stretched[number]
                record = dataclasses.replace(record, bytes=record.bytes * long // short)
            elif number in self.stretched and isinstance(record, Collective | Resize):
                raise Unequal
            result.records.append(record)
            result.numbers.append(NONE if number == NONE else name(number))
            result.operands.append(used)

    def _renumbered(self, own: int, number: int) -> int:
        made = self.made.get(number)
        if made is None or number in self.fixed:
            return number
        block = self._target(own, made.block)
        return number if block == made.block <= self.middle else self._number(made, block)

    def _renamed(self, record: Record, own: int) -> Record:
        path = _path_of(record)
        if path is None:
            return record
        block = self.block_of(path)
        if block == NONE:
            return record
        return self._shared(record, self._target(own, block), path)

    def _shared(self, record: Record, block: int, path: str) -> Record:
        """Return a record with the path of another block, the same one for the same record."""
        renamed = self.renamed_path(path, block)
        if renamed == path:
            return record
        key = id(record), block
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = _with_path(record, renamed)
        return found

    def _repeat(self, result: EditableTrace, part: EditableTrace, blocks: Iterable[int]) -> None:
        """Append the part of the middle block as that of each block that was left out."""
        middle, last = self.middle, self.middle + self.missing
        bases, steps, near, far = self._relative_numbers(part)
        for block in blocks:
            result.sections.append(Section(len(result), len(result) + len(part), self._translation(block)))
            result.records.extend(part.records)
            name = functools.partial(self._number_beside, block)
            if middle < block + near and block + far <= last:
                result.numbers.extend([base + step * block for base, step in zip(bases, steps, strict=True)])
            else:
                result.numbers.extend([number if number == NONE else name(number) for number in part.numbers])
            if self.keep_operands:
                result.operands.extend(None if used is None else used.renumbered(name) for used in part.operands)
            else:
                result.operands.extend([None] * len(part))

    def _translation(self, block: int) -> Translation:
        """Return the translation from the names of the middle block and those beside it to those of another one."""
        found = self.translations.get(block)
        if found is None:
            prefix, names, away = self.repeated.prefix, self.repeated.names, block - self.middle
            modules = {
                f"{prefix}{kept}": f"{prefix}{names[place + away]}"
                for place, kept in enumerate(self.repeated.kept)
                if place + away < len(names)
            }
            found = self.translations[block] = Translation(modules, {}, range(0), 0)
        return found

    def _relative_numbers(self, part: EditableTrace) -> tuple[list[int], list[int], int, int]:
        """Return the numbers of a part as multiples of the block that it is repeated for.

        Returns:
            What is added to the multiple, and the multiple, for each number; how many blocks before and behind its own
            one the part names.
        """
        bases, steps, distances = [], [], [0]
        for number in part.numbers:
            made = None if number == NONE or number in self.fixed else self.made.get(number)
            if made is None:
                bases.append(number)
                steps.append(0)
                continue
            base, size, orders = self.copies[made.sweep]
            if made.order not in orders:
                raise Unequal
            place, kind = orders[made.order]
            distance = made.block - self.middle
            bases.append((base + (distance - self.middle - 1) * size + place) * 3 + kind)
            steps.append(3 * size)
            distances.append(distance)
        return bases, steps, min(distances), max(distances)

    def _number_beside(self, block: int, number: int) -> int:
        """Return what a number of the middle block is for a block that was left out."""
        made = self.made.get(number)
        if made is None or number in self.fixed:
            return number
        return self._number(made, block + made.block - self.middle)

    def copy_of(self, number: int, block: int) -> int:
        made = self.made.get(number)
        if made is None:
            raise Unequal
        return self._number(made, block + made.block - self.middle)


def _living(trace: EditableTrace) -> set[int]:
    """Return the storages that are there in the end."""
    pairs = list(zip(trace.records, trace.numbers, strict=True))
    freed = {number for record, number in pairs if isinstance(record, Free)}
    return {number for record, number in pairs if isinstance(record, Allocate)} - freed


def _path_of(record: Record) -> str | None:
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
