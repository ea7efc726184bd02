"""Piece: captured trace of a program with few blocks and micro batches, from which longer traces are composed.

A piece is a sequence of parts. Each part is a segment whose instances differ only in numbers and in the names of
blocks. The instances of a block in the middle follow each other, one for every block that was not captured; likewise
those of a micro batch in the middle. Every number of a part is a sum: a base, a multiple of one period for the block
that defines it, and a multiple of a larger period for the micro batch. Composing a trace computes these sums, for all
instances at once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from legoai.cost.replay.lists import ListKernel, Stretch, stretched_length
from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import NONE, renumbered
from legoai.cost.trace.records import Allocate, Collective, Mark, Record
from legoai.cost.trace.rounds import Rounds
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.cost.trace.trace import Trace
from legoai.cost.trace.translation import Translation

Integers: TypeAlias = NDArray[np.int64]

_KEPT: Final = 16
"""Size of the cache of results that depend on the lengths of lists of blocks."""


class Term(NamedTuple):
    """A number of a part as a function of the block and micro batch of the instance, and of how many there are.

    Attributes:
        base: common to all corresponding numbers.
        container: of the block that defines it; `NONE` where it does not depend on a block.
        block: the block's index, counted from 1; 0 where it does not depend on a block.
        from_end: whether the blocks that were not captured come before it.
        each_block: whether it moves with the instance's block.
        batch: the micro batch that defines it, counted from 1 for the first that is repeated.
        each_batch: whether it moves with the instance's micro batch.
        last_batch: whether it moves with the last micro batch that is repeated.
    """

    base: int
    container: int = NONE
    block: int = 0
    from_end: bool = False
    each_block: bool = False
    batch: int = 0
    each_batch: bool = False
    last_batch: bool = False


class Move(NamedTuple):
    """Renaming of a block: a block name in a part, and the block that it denotes in a deeper model.

    Attributes:
        container: of the block.
        kept: its index among those that were captured.
        block: the index of the block that it denotes.
        from_end: whether the blocks that were not captured come before it.
        each_block: whether it moves with the instance's block.
    """

    container: int
    kept: int
    block: int
    from_end: bool
    each_block: bool


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """A record that forms an item of its own: a mark, or one that depends on the number of blocks or of micro batches.

    Attributes:
        record: as it was captured.
        term: its number.
        grows: the growth of its list of tensors, or of its storage, with the blocks.
        moves: for the names in it.
        batch: of the mark of a micro batch.
    """

    record: Record
    term: Term | None = None
    grows: ListKernel | Stretch | None = None
    moves: tuple[Move, ...] = ()
    batch: Term | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The numbers of a part as columns of terms; consecutive numbers share a column.

    Attributes:
        own: for storages, collectives and events that the part defines, in the order of their slots: the column of the
            first, how many there are, and whether they are consecutive.
        size: columns of these; the columns of numbers that the part uses and does not define come after them.
        terms: the fields of the terms, each a row with a value for each column.
    """

    own: tuple[tuple[int, int, bool], ...]
    size: int
    terms: Integers

    @classmethod
    def of(cls, own: Sequence[Sequence[Term]], outside: Sequence[Term]) -> Numbers:
        """Return the numbers of a part.

        Args:
            own: storages, collectives and events that it defines.
            outside: those that it uses and does not define.
        """
        columns: list[Term] = []
        ranges = []
        for terms in own:
            follow = len(terms) > 0 and all(
                term == terms[0]._replace(base=terms[0].base + index) for index, term in enumerate(terms)
            )
            ranges.append((len(columns), len(terms), follow))
            columns += terms[:1] if follow else terms
        size = len(columns)
        columns += outside
        return cls(tuple(ranges), size, np.array(columns, dtype=np.int64).reshape(-1, len(Term.__match_args__)).T)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Consecutive records that have instances.

    Attributes:
        segment: the records.
        numbers: those that they define and use.
        moves: for the names in them.
        container: whose block they repeat; `NONE` for none.
        backwards: whether they are repeated from the last block to the first.
    """

    segment: Segment
    numbers: Numbers
    moves: tuple[Move, ...] = ()
    container: int = NONE
    backwards: bool = False


Node: TypeAlias = Alone | Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Captured program from which traces for any depth and number of micro batches are composed.

    Attributes:
        rank: global rank that was simulated.
        world: ranks of the program.
        containers: of repeated blocks.
        taken: micro batches of a step that were captured: the fewest for which a trace can be composed.
        wanted: micro batches of a step of the program that was captured.
        fixed: whether the number of micro batches cannot be varied.
        before: parts before the micro batch that is repeated.
        repeated: its parts.
        behind: parts after it.
        period: greater than any base of a number.
    """

    rank: int
    world: int
    containers: tuple[RepeatedBlocks, ...]
    taken: int
    wanted: int
    fixed: bool
    before: tuple[Node, ...]
    repeated: tuple[Node, ...]
    behind: tuple[Node, ...]
    period: int
    _grown: dict[tuple[int, tuple[int, ...]], Record] = field(default_factory=dict, repr=False)

    @property
    def repeats(self) -> bool:
        """Whether traces of other programs can be composed."""
        return bool(self.containers) or not self.fixed

    @property
    def depths(self) -> dict[str, int]:
        """The number of blocks of each run of the captured program, by the run's key."""
        return {one.key: len(one.names) for one in self.containers}

    def trace(self, depths: Mapping[str, int] | None = None, micro_batches: int | None = None) -> Trace:
        """Compose the trace of a program with some depth and number of micro batches.

        Args:
            depths: the number of blocks of each run, by its key; runs that are not named have as many as in the
                captured program.
            micro_batches: of a step; None for as many as the captured program takes.

        Raises:
            ValueError: programs with so few blocks or micro batches have another trace, which must be captured.
        """
        wanted = self.wanted if micro_batches is None else micro_batches
        missing, names = self._blocks(depths or {}, wanted)
        with uncollected():
            composition = _Composition(self, names, missing, wanted - self.taken)
            items = tuple(composition.items())
        return Trace(rank=self.rank, world=self.world, stage=0, items=items, rounds=composition.rounds)

    def follows(self, depths: Mapping[str, int], micro_batches: int) -> bool:
        """Whether the trace of a program can be composed; arguments are those of :meth:`trace`."""
        try:
            self._blocks(depths, micro_batches)
        except ValueError:
            return False
        return True

    def _blocks(self, depths: Mapping[str, int], wanted: int) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
        """Return the result of :meth:`missing`, and the names of the blocks of each run."""
        if wanted < self.taken or (self.fixed and wanted != self.taken):
            raise ValueError(f"the trace of {wanted} micro batches cannot be composed from that of {self.taken}")
        missing, ahead = self.missing(depths), Counter[str]()
        names = []
        for one in self.containers:
            depth = depths.get(one.key, len(one.names))
            names.append(one.names_of(depth, ahead[one.prefix]))
            ahead[one.prefix] += depth - len(one.names)
        return missing, tuple(names)

    def depths_of(self, lengths: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
        """Return the number of blocks of each run of another program, by the run's key; None where it has other runs.

        Args:
            lengths: of the runs of each list of blocks, by the list's path, in order.
        """
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for one in self.containers:
            keys[one.prefix.removesuffix(".")].append(one.key)
        if {path: len(runs) for path, runs in lengths.items()} != {path: len(own) for path, own in keys.items()}:
            return None
        return {key: length for path, own in keys.items() for key, length in zip(own, lengths[path], strict=True)}

    def containers_of_segments(self) -> dict[int, set[int]]:
        """Return, for each segment by its identity, the containers whose blocks repeat it."""
        found: defaultdict[int, set[int]] = defaultdict(set)
        for node in (*self.before, *self.repeated, *self.behind):
            if isinstance(node, Part) and node.container != NONE:
                found[id(node.segment)].add(node.container)
        return found

    def missing(self, depths: Mapping[str, int]) -> tuple[int, ...]:
        """Return, for each run, how many groups of blocks were not captured and have to be repeated.

        Args:
            depths: as of :meth:`trace`.

        Raises:
            ValueError: programs with so few blocks have another trace, or the blocks make no whole groups.
        """
        unknown = depths.keys() - self.depths.keys()
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: no run of repeated blocks")
        found = []
        for one in self.containers:
            depth = depths.get(one.key, len(one.names))
            if depth < len(one.kept):
                raise ValueError(f"the trace of fewer than {len(one.kept)} blocks cannot be composed from that of more")
            found.append(one.groups(depth - len(one.kept)))
        return tuple(found)

    def excerpt(self, missing: tuple[int, ...], left: tuple[int, ...], micro_batches: int) -> Trace:
        """Compose the records that take time, with few of the repeated blocks and micro batches.

        Lists of tensors are those of all blocks. Modules keep the names that they were captured with.

        Args:
            missing: for each run, groups of blocks of the program that were not captured.
            left: for each run, how many of these are in the excerpt.
            micro_batches: of a step of the excerpt.
        """
        names = tuple(
            tuple(map(str, range(len(one.kept) + more * one.period)))
            for one, more in zip(self.containers, left, strict=True)
        )
        with uncollected():
            items = tuple(_Composition(self, names, left, micro_batches - self.taken, lists=missing).items())
        return Trace(rank=self.rank, world=self.world, stage=0, items=items)

    def grown(self, node: Alone, missing: tuple[int, ...]) -> Record:
        """Return a record that grows with the blocks, with ``missing`` further blocks of each container."""
        key = id(node), missing
        found = self._grown.get(key)
        if found is None:
            if len(self._grown) > _KEPT * 100:
                self._grown.clear()
            found = self._grown[key] = _grown(node, missing)
        return found


class _Composition:
    """One trace that is composed from a piece.

    Args:
        piece: the piece.
        names: of the blocks of each container.
        missing: for each container, groups of blocks that were not captured.
        more: further micro batches.
        lists: for an excerpt, the missing groups that lists of tensors include; names then stay as they were captured.
    """

    def __init__(
        self,
        piece: Piece,
        names: tuple[tuple[str, ...], ...],
        missing: tuple[int, ...],
        more: int,
        *,
        lists: tuple[int, ...] | None = None,
    ) -> None:
        self.piece, self.names, self.missing, self.more = piece, names, missing, more
        self.lists = missing if lists is None else lists
        self.renames = lists is None
        self.block_period = piece.period
        self.batch_period = piece.period * (2 + max(map(len, names), default=0))
        self.translations: dict[tuple[tuple[Move, ...], int], Translation | None] = {}
        self.rounds: Rounds | None = None
        """The repeated micro batches, once their items were composed."""

    def items(self) -> Iterator[Item]:
        """Yield the items of the trace."""
        before = list(self._once(self.piece.before))
        yield from before
        if self.piece.repeated:
            batches = range(self.more + 1)
            nodes = [list(self._of_batches(node, batches)) for node in self.piece.repeated]
            for batch in batches:
                for found in nodes:
                    yield from found[batch]
            length = sum(len(found[0]) for found in nodes)
            self.rounds = Rounds(first=len(before), length=length, count=len(batches), shift=self.batch_period)
        yield from self._once(self.piece.behind)

    def _once(self, nodes: Sequence[Node]) -> Iterator[Item]:
        for node in nodes:
            for found in self._of_batches(node, range(1)):
                yield from found

    def _of_batches(self, node: Node, batches: range) -> Iterator[list[Item]]:
        """Yield the items of a node in each micro batch."""
        if isinstance(node, Alone):
            for batch in batches:
                yield [self._alone(node, batch)]
            return
        numbers, segment = node.numbers, node.segment
        blocks = range(1 if node.container == NONE else self.missing[node.container] + 1)
        if node.backwards:
            blocks = blocks[::-1]
        translations = [self._translation(node.moves, block) for block in blocks]
        size = numbers.size
        for rows in self._rows(numbers, blocks, batches):
            found: list[Item] = []
            for row, translation in zip(rows, translations, strict=True):
                own = [
                    range(row[column], row[column] + count) if contiguous else row[column : column + count]
                    for column, count, contiguous in numbers.own
                ]
                found.append(Instance(segment, tuple(own), row[size:], translation))  # type: ignore[arg-type]
            yield found

    def _rows(self, numbers: Numbers, blocks: range, batches: range) -> list[list[list[int]]]:
        """Return the numbers of a part in each micro batch and block, by column."""
        base, container, block, from_end, each_block, batch, each_batch, last_batch = numbers.terms
        missing = np.array((*self.missing, 0), dtype=np.int64)[container]  # `NONE` is the last
        first = base + self.block_period * (block + from_end * missing)
        first += self.batch_period * (batch + self.more * last_batch)
        by_block = np.arange(blocks.start, blocks.stop, blocks.step)[:, None] * (self.block_period * each_block)
        by_batch = np.arange(len(batches))[:, None, None] * (self.batch_period * each_batch)
        found: list[list[list[int]]] = (first + by_block[None, :, :] + by_batch).tolist()
        return found

    def _value(self, term: Term, batch: int) -> int:
        blocks = term.block + (self.missing[term.container] if term.from_end else 0)
        batches = term.batch + (batch if term.each_batch else 0) + (self.more if term.last_batch else 0)
        return term.base + self.block_period * blocks + self.batch_period * batches

    def _alone(self, node: Alone, batch: int) -> Record:
        record = node.record if node.grows is None else self.piece.grown(node, self.lists)
        if node.moves and (translation := self._translation(node.moves, 0)) is not None:
            record = translation.record(record)
        if node.batch is not None:
            number = node.batch.base + (batch if node.batch.each_batch else 0)
            return Mark(f"{MICRO_BATCH}{number + (self.more if node.batch.last_batch else 0)}")
        return record if node.term is None else renumbered(record, self._value(node.term, batch))

    def _translation(self, moves: tuple[Move, ...], block: int) -> Translation | None:
        """Return the translation of block names; None where they stay the same."""
        if not moves or not self.renames:
            return None
        key = moves, block
        if key not in self.translations:
            modules = {}
            for move in moves:
                one, names = self.piece.containers[move.container], self.names[move.container]
                place = move.block + (self.missing[move.container] if move.from_end else 0)
                place += block if move.each_block else 0
                for order in range(one.period):
                    kept, meant = one.kept[move.kept * one.period + order], names[place * one.period + order]
                    if kept != meant:
                        modules[f"{one.prefix}{kept}"] = f"{one.prefix}{meant}"
            self.translations[key] = Translation(modules, {}, range(0), 0) if modules else None
        return self.translations[key]


def _grown(node: Alone, missing: Sequence[int]) -> Record:
    if isinstance(node.grows, ListKernel):
        return node.grows.grown(missing)
    record = node.record
    assert isinstance(record, Allocate | Collective)
    assert node.grows is not None
    return dataclasses.replace(record, bytes=record.bytes * stretched_length(node.grows, missing) // node.grows[0])
