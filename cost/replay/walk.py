"""Walk of a trace through the blocks of a model: the order of visits, and the block of each record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.trace.editing import EditableTrace, Operands, is_micro_batch
from legoai.cost.trace.marks import ACTION, ACTION_APART, BACKWARD_ACTION, END_ACTION, GATHER_APART
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import Allocate, Categorise, Collective, Copy, Free, Kernel, Mark, Record, Resize

OTHER: Final = NONE - 1
"""Stands for a block of the same container that belongs to another run."""

_BOUNDS: Final = ("step ", "end step ", ACTION, END_ACTION)


class Unequal(Exception):  # noqa: N818 (it never leaves the repetition of blocks)
    """The blocks of a trace are not equal, or are connected in an unsupported way."""


class Sweep(NamedTuple):
    """A span of records that passes through the blocks once.

    Attributes:
        bounds: start of each block's section, in the order of the records, and the end of the last one.
        blocks: the block of each section.
    """

    bounds: tuple[int, ...]
    blocks: tuple[int, ...]


class Walk:
    """Walk of a trace through repeated blocks.

    Attributes:
        trace: of few blocks.
        repeated: its blocks.
        place: the block of each name; a block here is a whole group of the blocks that a run repeats.
        order: the index of each name in its group.
        owners: the block of each storage that belongs to one.
        sweeps: every pass of the trace through the blocks.

    Raises:
        Unequal: the trace does not pass from block to block.
    """

    def __init__(self, trace: EditableTrace, repeated: RepeatedBlocks) -> None:
        self.trace = trace
        self.repeated = repeated
        self.place = {name: index // repeated.period for index, name in enumerate(repeated.kept)}
        self.order = {name: index % repeated.period for index, name in enumerate(repeated.kept)}
        self.blocks: dict[str, int] = {}
        self.apart = self._apart()
        self.owners = self._owners()
        self.sweeps = self._sweeps()

    @property
    def middle(self) -> int:
        """The index of the block that is repeated."""
        return self.repeated.middle

    @property
    def missing(self) -> int:
        """How many blocks were left out."""
        return self.repeated.missing

    def block_of(self, path: str) -> int:
        """Return the captured block of a module; `NONE` for none."""
        block = self.blocks.get(path)
        if block is None:
            inside = path.startswith(self.repeated.prefix)
            name = path[len(self.repeated.prefix) :].partition(".")[0]
            block = self.blocks[path] = self.place.get(name, NONE) if inside else NONE
        return block

    def _is_other(self, path: str) -> bool:
        """Whether a module belongs to a block of the container outside this run."""
        prefix = self.repeated.prefix
        return path.startswith(prefix) and path[len(prefix) :].partition(".")[0] not in self.place

    def _owners(self) -> dict[int, int]:
        """Return the block of each storage, where a module or a list determines it."""
        owners: dict[int, int] = {}
        trace = self.trace
        for record, number in zip(trace.records, trace.numbers, strict=True):
            if isinstance(record, Allocate | Categorise):
                block = self.block_of(record.module)
                if block != NONE:
                    owners[number] = block
        for used in trace.operands:
            if used is not None and len(used.outputs) > 1 and len(used.outputs) == len(used.inputs):
                for source, target in zip(used.inputs, used.outputs, strict=True):
                    if source in owners and target != NONE:
                        owners.setdefault(target, owners[source])
        for span in self.apart:  # a unit's parameters are copied in, all-gathered and copied out
            if not _named(trace.records[span.start], GATHER_APART):
                continue
            for used in trace.operands[span.start : span.stop]:
                if used is not None and (block := _only_owner(owners, used)) != NONE:
                    owners.update({number: block for number in (*used.inputs, *used.outputs) if number != NONE})
        return owners

    def _apart(self) -> list[range]:
        """Return the ranges of records of pipeline actions that belong to no micro batch."""
        records = self.trace.records
        marks = [index for index, item in enumerate(records) if isinstance(item, Mark)]
        pairs = zip(marks, [*marks[1:], len(records)], strict=True)
        return [range(index, end) for index, end in pairs if _named(records[index], ACTION_APART)]

    def _labels(self) -> list[int]:
        """Return the block of each record, where it is certain; `OTHER` for blocks of other runs."""
        trace, labels = self.trace, [NONE] * len(self.trace)
        owners = self.owners
        between = self._between_passes()
        for index, record in enumerate(trace.records):
            if isinstance(record, Kernel):
                labels[index] = self.block_of(record.module)
                if labels[index] == NONE and self._is_other(record.module):
                    labels[index] = OTHER
                elif labels[index] == NONE and between[index]:
                    labels[index] = self._block_used_by(trace.operands[index])
            elif isinstance(record, Mark):
                head, _, path = record.name.partition(" ")
                if head == "forward" and path.removeprefix(self.repeated.prefix) in self.place:
                    labels[index] = self.block_of(path)
                elif head == "forward" and self._is_other(path):
                    labels[index] = OTHER
            elif between[index]:
                if isinstance(record, Allocate | Categorise):
                    block = self.block_of(record.module)
                    labels[index] = block if block != NONE else owners.get(trace.numbers[index], NONE)
                elif isinstance(record, Free | Resize):
                    labels[index] = owners.get(trace.numbers[index], NONE)
        return labels

    def _block_used_by(self, used: Operands | None) -> int:
        """Return the only block whose storages a kernel uses."""
        return NONE if used is None else _only_owner(self.owners, used)

    def _between_passes(self) -> list[bool]:
        """Return for each record whether it is outside of all forwards and backwards."""
        records = self.trace.records
        between = [True] * len(records)
        start = None
        last = 0
        for index, record in enumerate(records):
            if isinstance(record, Mark):
                if start is not None and (is_micro_batch(record) or record.name.startswith("end step ")):
                    between[start : last + 1] = [False] * (last + 1 - start)
                    start = None
                if is_micro_batch(record) or record.name.startswith("step "):
                    start, last = index, index
            elif isinstance(record, Kernel | Collective | Copy) and record.phase in ("backward", "recompute"):
                last = index
        for span in self.apart:  # these iterate over parameters, as an optimizer does
            between[span.start : span.stop] = [True] * len(span)
        return between

    def _sweeps(self) -> list[Sweep]:
        """Find the sweeps of the trace through the blocks."""
        runs: list[tuple[int, int]] = []
        before = None
        backward = apart = False
        for index, (record, label) in enumerate(zip(self.trace.records, self._labels(), strict=True)):
            if isinstance(record, Kernel) and not apart:
                backward = record.phase in ("backward", "recompute")
            elif isinstance(record, Mark) and record.name.startswith((ACTION, END_ACTION)):
                before, backward = None, record.name.startswith(BACKWARD_ACTION)
                apart = record.name.startswith(ACTION_APART)
            if label != NONE and (label, backward) != before:
                runs.append((index, label))
                before = label, backward
        found: list[Sweep] = []
        middle, size = self.middle, len(runs)
        for at, (_, label) in enumerate(runs):
            if label != middle:
                continue
            if not 0 < at < size - 1:
                raise Unequal
            step = runs[at + 1][1] - label
            if abs(step) != 1 or runs[at - 1][1] != label - step:
                raise Unequal
            first = last = at
            while first and runs[first - 1][1] == runs[first][1] - step:
                first -= 1
            while last + 1 < size and runs[last + 1][1] == runs[last][1] + step:
                last += 1
            end = self._end(*runs[last], runs[last + 1][0] if last + 1 < size else len(self.trace))
            starts = [start for start, _ in runs[first : last + 1]]
            found.append(Sweep((*starts, end), tuple(block for _, block in runs[first : last + 1])))
        beside = [sum(label == middle + step for _, label in runs) for step in (-1, 0, 1)]
        if not found or len(set(beside)) != 1:
            raise Unequal
        return found

    def _end(self, start: int, block: int, stop: int) -> int:
        """Return the end of the last section of a sweep, which starts at a block and ends at an index at the latest."""
        first = self.trace.records[start]
        if isinstance(first, Mark):
            names = [name for name, place in self.place.items() if place == block]
            last = f"end {self.repeated.prefix}{names[-1]}"
            for index in range(start, stop):
                record = self.trace.records[index]
                if isinstance(record, Mark) and record.name == last:
                    return index + 1
        marks = (index for index in range(start, stop) if self._begins_or_ends(self.trace.records[index]))
        return next(marks, stop)

    @staticmethod
    def _begins_or_ends(record: Record) -> bool:
        """Whether a record begins or ends a step, micro batch or action: no section of a block continues past it."""
        return isinstance(record, Mark) and (is_micro_batch(record) or record.name.startswith(_BOUNDS))


def _named(record: Record, name: str) -> bool:
    return isinstance(record, Mark) and record.name.startswith(name)


def _only_owner(owners: Mapping[int, int], used: Operands) -> int:
    """Return the only block whose storages a kernel uses."""
    blocks = {owners.get(number, NONE) for number in (*used.inputs, *used.outputs)} - {NONE}
    return blocks.pop() if len(blocks) == 1 else NONE
