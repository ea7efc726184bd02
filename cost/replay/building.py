"""Construction of a piece from the trace of a program with few blocks and micro batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from legoai.cost.replay.depth import BlockRepetition, path_of
from legoai.cost.replay.lists import ListKernel, list_kernel, stretched_by_all
from legoai.cost.replay.micro_batches import RepeatedMicroBatch, repeated_micro_batch
from legoai.cost.replay.piece import Alone, Move, Node, Numbers, Part, Piece, Term
from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.replay.walk import Unequal
from legoai.cost.trace.editing import EditableTrace, is_micro_batch
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import FIELD, MAKES, NONE
from legoai.cost.trace.records import Allocate, Collective, Free, HostKernel, Kernel, Mark, Record, Resize, WaitWork
from legoai.cost.trace.segments import Instance, Item, Segment, slot_inside, slot_outside

_FURTHER: Final = 7
"""Blocks that are added to every container to check a piece: more than the distance at which blocks refer to others."""


def piece_of(
    trace: EditableTrace, runs: Sequence[RepeatedBlocks], *, rank: int, world: int, wanted: int
) -> Piece | None:
    """Return the piece of a trace; None where its blocks or micro batches are not equal.

    Args:
        trace: of few blocks and micro batches, with the operands of all kernels.
        runs: blocks of which some may have been left out.
        rank: global rank that was simulated.
        world: ranks of the program.
        wanted: micro batches of a step of the program; 0 where they are not counted.
    """
    try:
        return _Building(trace, runs).piece(rank, world, wanted)
    except Unequal:
        return None


def stretched(trace: EditableTrace, runs: Sequence[RepeatedBlocks]) -> tuple[Sequence[Item], list[BlockRepetition]]:
    """Return the items of an excerpt of a trace with all blocks, and the repetition of each container's blocks.

    Numbers that blocks define differ from those of the excerpt; all other numbers stay the same. It is not checked that
    every number is defined before it is used and ends once, because what an excerpt leaves out may do that.

    Args:
        trace: of few blocks, with the operands of all kernels.
        runs: repeated blocks of which some were left out.

    Raises:
        Unequal: its blocks are not equal.
    """
    building = _Building(trace, runs)
    return building.piece(0, 1, 0, check=False).trace().items, building.repetitions


class _Position(NamedTuple):
    """Position of a record in the repetition. Neighbouring records of equal position form a part.

    Attributes:
        region: before the repeated micro batch, in it, or after it.
        own: for each container, the block to whose section the record belongs.
        sweep: of the container, if the record belongs to its middle block; `NONE` otherwise.
        container: that container; `NONE` for none.
        alone: differs for each record that forms an item of its own.
    """

    region: int
    own: tuple[int, ...]
    sweep: int
    container: int
    alone: int


class _Building:
    def __init__(self, trace: EditableTrace, runs: Sequence[RepeatedBlocks]) -> None:
        self.trace = trace
        self.repetitions = [BlockRepetition(trace, run) for run in runs]
        self.stretched = stretched_by_all([one.stretched for one in self.repetitions])
        if self.repetitions and any(self._is_for_all(record) for record in trace.records):
            raise Unequal
        self.batch: RepeatedMicroBatch | None = None
        self.like: dict[int, int] = {}
        """For numbers that a micro batch defines and the next one uses: the corresponding number of the latter."""
        self.moving: set[int] = set()
        self.terms: dict[tuple[int, _Position], Term] = {}
        self.segments: dict[object, Segment] = {}
        self.middles: dict[tuple[int, int], tuple[Sequence[Record], range]] = {}

    def piece(self, rank: int, world: int, wanted: int, *, check: bool = True) -> Piece:
        """Return the piece of the trace; ``check`` is false for excerpts, which do not contain every definition."""
        taken = self._set_micro_batch(wanted)
        nodes = list(self._nodes())
        regions = [tuple(node for region, node in nodes if region == here) for here in range(3)]
        piece = Piece(
            rank=rank,
            world=world,
            containers=tuple(one.repeated for one in self.repetitions),
            taken=taken,
            wanted=wanted or taken,
            fixed=self.batch is None,
            before=regions[0],
            repeated=regions[1],
            behind=regions[2],
            period=max(self.trace.numbers, default=0) // 3 + 1,
        )
        if check:
            self._check(piece)
        return piece

    def _set_micro_batch(self, wanted: int) -> int:
        """Find the micro batch that is repeated; return the number of micro batches of the last step."""
        marks = [index for index, record in enumerate(self.trace.records) if is_micro_batch(record)]
        steps = [index for index, record in enumerate(self.trace.records) if _is_step(record)]
        taken = sum(index > steps[-1] for index in marks) if steps else 0
        try:
            self.batch = repeated_micro_batch(self.trace)
        except Unequal:
            if wanted not in (0, taken):
                raise
        if self.batch is None:
            if wanted not in (0, taken):
                raise Unequal
            return taken
        self.moving = set(self.batch.moving)
        for number, own in self.batch.moving.items():
            mine, theirs = self._likeness(number), self._likeness(own)
            if [place for _, place in mine[1]] != [place for _, place in theirs[1]]:
                raise Unequal
            if self.like.setdefault(mine[0], theirs[0]) != theirs[0]:
                raise Unequal
        return taken

    def _likeness(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the corresponding number of the middle block, and the container and block of the number."""
        for container, one in enumerate(self.repetitions):
            place = one.place_of(number, NONE)
            if place is not None and self._is_own(place.like) == self._is_own(number):
                return place.like, [(container, place.block)]
        return number, []

    def _check(self, piece: Piece) -> None:
        """Check that every used number is defined, and that added blocks free what the middle one frees."""
        depths = {
            one.key: len(one.kept) + _FURTHER * one.period if one.numbered else len(one.names)
            for one in piece.containers
        }
        trace = piece.trace(depths, piece.taken + (0 if piece.fixed else 2))
        storages = _living_of(trace.items)
        kept = _living(zip(self.trace.records, self.trace.numbers, strict=True))
        added = 0
        for one, depth in zip(self.repetitions, depths.values(), strict=True):
            ours = one.made_by_middle
            added += one.repeated.groups(depth - len(one.repeated.kept)) * len(kept & ours)
        if len(storages) != len(kept) + added:
            raise Unequal

    def _nodes(self) -> Iterator[tuple[int, Node]]:
        """Yield the nodes of the trace, each with its region."""
        wheres = self._positions()
        bounds = [index for index, where in enumerate(wheres) if index == 0 or where != wheres[index - 1]]
        ranges = [range(start, stop) for start, stop in zip(bounds, [*bounds[1:], len(wheres)], strict=True)]
        for span in ranges:
            where = wheres[span.start]
            if where.container != NONE:
                key = where.container, where.sweep
                if key in self.middles:
                    raise Unequal  # something else interrupts the section of a block
                self.middles[key] = self.trace.records[span.start : span.stop], span
        for span in ranges:
            where = wheres[span.start]
            yield where.region, self._part(span, where) if where.alone == NONE else self._alone(span.start, where)

    def _positions(self) -> list[_Position]:
        """Return the position of every record."""
        records, batch = self.trace.records, self.batch
        start, stop = (len(records), len(records)) if batch is None else (batch.start, batch.stop)
        owns = list(zip(*[one.own for one in self.repetitions], strict=True)) or [()] * len(records)
        middles = [one.middle for one in self.repetitions]
        found: list[_Position] = []
        same: dict[tuple[int, tuple[int, ...], int, int], _Position] = {}
        for index, (record, own) in enumerate(zip(records, owns, strict=True)):
            region = 0 if index < start else 1 if index < stop else 2
            container, sweep = NONE, NONE
            for place, middle in enumerate(middles):
                if own[place] != middle:
                    continue
                if container != NONE:
                    raise Unequal
                container, sweep = place, self.repetitions[place].sweep[index]
            if self._stands_alone(index, record):
                if container != NONE:
                    raise Unequal
                found.append(_Position(region, own, sweep, container, index))
                continue
            key = region, own, sweep, container
            where = same.get(key)
            if where is None:
                where = same[key] = _Position(*key, alone=NONE)
            found.append(where)
        return found

    def _is_for_all(self, record: Record) -> bool:
        """Whether the host computes outside all blocks: the dependence on the number of blocks is not known."""
        return isinstance(record, HostKernel) and all(one.block_of(record.module) == NONE for one in self.repetitions)

    def _stands_alone(self, index: int, record: Record) -> bool:
        """Whether a record forms an item of its own."""
        if isinstance(record, Mark):
            return _is_step(record) or is_micro_batch(record) or record.name.startswith("end step ")
        if self.trace.numbers[index] in self.stretched and isinstance(record, Allocate | Collective | Resize):
            return True
        return isinstance(record, Kernel) and self._list_kernel(index, record) is not None

    def _list_kernel(self, index: int, record: Kernel) -> ListKernel | None:
        used = self.trace.operands[index]
        if used is None or not self.repetitions:
            return None
        return list_kernel(record, used, self.repetitions, self.stretched)

    def _alone(self, index: int, where: _Position) -> Alone:
        """Return a record that forms an item of its own."""
        record, number = self.trace.records[index], self.trace.numbers[index]
        if is_micro_batch(record) and self.batch is not None:
            assert isinstance(record, Mark)
            batch = int(record.name.removeprefix(MICRO_BATCH))
            term = Term(batch, each_batch=where.region == 1, last_batch=where.region == 2)
            return Alone(record, batch=term)
        if isinstance(record, Kernel):
            return Alone(record, grows=self._list_kernel(index, record), moves=self._moves([record], where))
        if number == NONE:
            return Alone(record)
        if not isinstance(record, Allocate | Collective):
            raise Unequal
        moves = self._moves([record], where)
        return Alone(record, term=self._term(number, where), grows=self.stretched[number], moves=moves)

    def _part(self, span: range, where: _Position) -> Part:
        """Return neighbouring records as a part."""
        records: Sequence[Record] = self.trace.records[span.start : span.stop]
        numbers = self.trace.numbers[span.start : span.stop]
        moves = None
        if where.container == NONE:
            for container in range(len(self.repetitions)):
                if where.own[container] != NONE:
                    records, moves = self._like_the_middle(container, records, span, where)
                    if moves is not None:
                        break
        if moves is None:
            moves = self._moves(records, where)
            self._check_no_list(numbers, where)
        named = [
            (record, NONE if number == NONE else number % 3, None if number == NONE else self._term(number, where))
            for record, number in zip(records, numbers, strict=True)
        ]
        own: tuple[dict[Term, int], dict[Term, int], dict[Term, int]] = ({}, {}, {})
        for record, kind, term in named:
            if term is not None and isinstance(record, MAKES):
                own[kind].setdefault(term, len(own[kind]))
        outside: dict[tuple[int, Term], int] = {}
        slots = []
        for _, kind, term in named:
            if term is None:
                slots.append(NONE)
            elif term in own[kind]:
                slots.append(slot_inside(kind, own[kind][term]))
            else:
                slots.append(slot_outside(outside.setdefault((kind, term), len(outside))))
        key = tuple(map(id, records)), tuple(slots)
        segment = self.segments.get(key)
        if segment is None:
            segment = self.segments[key] = Segment(tuple(records), tuple(slots))
        backwards = False
        if where.container != NONE:
            sweep = self.repetitions[where.container].sweeps[where.sweep]
            backwards = sweep.blocks[0] > sweep.blocks[-1]
        return Part(
            segment=segment,
            numbers=Numbers.of([list(made) for made in own], [term for _, term in outside]),
            moves=moves,
            container=where.container,
            backwards=backwards,
        )

    def _check_no_list(self, numbers: Sequence[int], where: _Position) -> None:
        """Check that records outside a sweep do not iterate over what all blocks define."""
        for container, one in enumerate(self.repetitions):
            if where.container == container:
                continue
            named: defaultdict[int, set[int]] = defaultdict(set)
            for number in set(numbers) & one.made.keys():
                place = one.place_of(number, where.own[container])
                if place is not None:
                    named[place.like].add(place.block)
            if any({one.middle - 1, one.middle, one.middle + 1} <= blocks for blocks in named.values()):
                raise Unequal

    def _like_the_middle(
        self, container: int, records: Sequence[Record], span: range, where: _Position
    ) -> tuple[Sequence[Record], tuple[Move, ...] | None]:
        """Replace the records of a block by those of the middle block, where they are equal.

        Returns:
            The records, and the moves of the block names in them; None for the moves where the records are not equal.
        """
        one, block = self.repetitions[container], where.own[container]
        sweep = one.sweep[span.start]
        middle, _ = self.middles.get((container, sweep), ((), range(0)))
        if len(middle) != len(records) or any(one.sweep[index] != sweep for index in (span.start, span.stop - 1)):
            return records, None
        if any(one.moved(a, block) != one.moved(b, one.middle) for a, b in zip(records, middle, strict=True)):
            return records, None
        away, from_end = block - one.middle, block > one.middle
        named = {one.block_of(path) for record in middle if (path := path_of(record)) is not None} - {NONE}
        if any(other.block_of(path) != NONE for other in self.repetitions if other is not one
               for record in middle if (path := path_of(record)) is not None):  # fmt: skip
            return records, None
        return middle, tuple(Move(container, kept, kept + away, from_end, False) for kept in sorted(named))

    def _moves(self, records: Sequence[Record], where: _Position) -> tuple[Move, ...]:
        """Return, for block names in records, the blocks that they denote in a deeper model."""
        found: dict[tuple[int, int], Move] = {}
        for record in {id(record): record for record in records}.values():
            path = path_of(record)
            if path is None:
                continue
            for container, one in enumerate(self.repetitions):
                block = one.block_of(path)
                if block == NONE:
                    continue
                own = where.own[container]
                each = where.container == container
                from_end = not each and one.counted_from_end(block, own)
                found[container, block] = Move(container, block, block, from_end, each)
        return tuple(found[key] for key in sorted(found))

    def _term(self, number: int, where: _Position) -> Term:
        """Return a number of the trace as a term of a piece."""
        key = number, where._replace(alone=NONE, sweep=NONE)
        found = self.terms.get(key)
        if found is None:
            found = self.terms[key] = self._found_term(number, where)
        return found

    def _found_term(self, number: int, where: _Position) -> Term:
        term, like = Term(number), number
        for container, one in enumerate(self.repetitions):
            place = one.place_of(number, where.own[container])
            if place is None or self._is_own(place.like) != self._is_own(number):
                continue
            if where.own[container] == NONE and place.block == one.middle:
                raise Unequal  # the records would have to use the numbers of further blocks too
            each, like = where.container == container, place.like
            term = Term(like, container, place.block + 1, place.from_end and not each, each)
            break
        if self.batch is None:
            pass
        elif self._is_own(like):
            if where.region == 0:
                raise Unequal
            term = term._replace(batch=1, each_batch=where.region == 1, last_batch=where.region == 2)
        elif like in self.like:
            if where.region == 1 and number not in self.moving:
                raise Unequal
            term = term._replace(base=self.like[like], each_batch=where.region == 1)
        return term._replace(base=term.base // 3)

    def _is_own(self, number: int) -> bool:
        """Whether the repeated micro batch defines a number."""
        return self.batch is not None and number in self.batch.own


def _is_step(record: Record) -> bool:
    return isinstance(record, Mark) and record.name.startswith("step ")


def _living(pairs: Iterable[tuple[Record, int]]) -> set[int]:
    """Return the storages that are alive at the end."""
    made: set[int] = set()
    for record, number in pairs:
        if isinstance(record, Allocate):
            made.add(number)
        elif isinstance(record, Free):
            made.discard(number)
    return made


def _living_of(items: Iterable[Item]) -> set[int]:
    """Return the storages that are alive at the end of a trace.

    Raises:
        Unequal: it uses a storage or a collective that is not defined or has ended, or defines one twice.
    """
    storages: set[int] = set()
    works: set[int] = set()
    for record, number in _numbered(items):
        kind = type(record)
        known = works if kind is Collective or kind is WaitWork else storages
        if (number in known) is (kind is Allocate or kind is Collective):
            raise Unequal
        if kind is Free:
            storages.remove(number)
        else:
            known.add(number)
    return storages


def _numbered(items: Iterable[Item]) -> Iterator[tuple[Record, int]]:
    """Yield the records that name storages or collectives, each with its number; module names are not translated."""
    for item in items:
        if not isinstance(item, Instance):
            kind = FIELD.get(type(item))
            if kind is not None and kind != "event":
                yield item, getattr(item, kind)
            continue
        for record, slot in zip(item.segment.records, item.segment.slots, strict=True):
            if slot != NONE and FIELD[type(record)] != "event":
                yield record, item.number(slot)
