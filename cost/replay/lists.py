"""Extension of kernels that take the tensors of all blocks as a list.

The norm of the gradients, their clipping and the optimizer take every parameter at once. Their lists are lengthened
where those of the middle block stand, with the traffic of each tensor; and so are the vectors that have one element
for each of a list.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from legoai.cost.replay.walk import Unequal, Walk
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.records import Kernel, TensorType

_JOINS: Final = frozenset({"aten.stack", "aten.cat"})
"""Operators whose one result is as long as their list of inputs."""


class Entry(NamedTuple):
    """One tensor of a list, and what the kernel reads and writes of it."""

    type: TensorType
    number: int
    block: int
    traffic: tuple[int, ...]

    def stretched(self, short: int, long: int) -> Entry:
        """Return the same with a first dim that is longer."""
        shape = (long, *self.type.shape[1:])
        return self._replace(
            type=TensorType(shape, self.type.dtype), traffic=tuple(share * long // short for share in self.traffic)
        )


class Lists(Walk, ABC):
    """Lengthens the lists of a trace's kernels.

    Attributes:
        stretched: storages of vectors with one element for each of a list, and how long they were and become.
    """

    stretched: dict[int, tuple[int, int]]

    @abstractmethod
    def copy_of(self, number: int, block: int) -> int:
        """Return what a number of the middle block is for a block that was left out."""

    def widened(self, kernel: Kernel, used: Operands, name: Callable[[int], int]) -> tuple[Kernel, Operands]:
        """Return a kernel whose lists have the tensors of all blocks."""
        stretched = [number for number in used.inputs if number in self.stretched]
        spans = self._spans(kernel, used)
        if not stretched and not spans:
            return kernel, used.renumbered(name)
        if not used.whole or kernel.flops:
            raise Unequal
        sides = []
        for types, numbers, *traffic in (
            (kernel.inputs, used.inputs, used.read, used.written),
            (kernel.outputs, used.outputs, used.new),
        ):
            entries = self._entries(types, numbers, traffic)
            sides.append(self._longer(entries, name) if spans else [(e, name(e.number)) for e in entries])
        inputs, outputs = sides
        if spans and len(outputs) == 1 == len(kernel.outputs):
            outputs = self._joined(kernel, inputs, outputs)
        elif spans and outputs and len(outputs) != len(inputs):
            raise Unequal
        if stretched:
            inputs, outputs = self._stretched_sides(inputs, outputs)
        reads, writes = sum(e.traffic[0] for e, _ in inputs), sum(e.traffic[1] for e, _ in inputs)
        return (
            dataclasses.replace(
                kernel,
                inputs=tuple(entry.type for entry, _ in inputs),
                outputs=tuple(entry.type for entry, _ in outputs),
                bytes_read=reads,
                bytes_written=writes + sum(entry.traffic[0] for entry, _ in outputs),
            ),
            Operands(
                tuple(number for _, number in inputs),
                tuple(number for _, number in outputs),
                tuple(entry.traffic[0] for entry, _ in inputs),
                tuple(entry.traffic[1] for entry, _ in inputs),
                tuple(entry.traffic[0] for entry, _ in outputs),
                used.whole,
            ),
        )

    def _spans(self, kernel: Kernel, used: Operands) -> bool:
        """Whether a kernel outside of the blocks takes tensors of all of them."""
        if self.block_of(kernel.module) != NONE or len(used.inputs) < len(self.repeated.kept):
            return False
        blocks = {self.owners.get(number, NONE) for number in used.inputs}
        return {self.middle - 1, self.middle, self.middle + 1} <= blocks

    def _entries(
        self, types: Sequence[TensorType], numbers: Sequence[int], traffic: Sequence[Sequence[int]]
    ) -> list[Entry]:
        return [
            Entry(kind, number, self.owners.get(number, NONE), shares)
            for kind, number, shares in zip(types, numbers, zip(*traffic, strict=True), strict=True)
        ]

    def _longer(self, entries: list[Entry], name: Callable[[int], int]) -> list[tuple[Entry, int]]:
        """Put the entries of the missing blocks behind those of the middle one, wherever the list has these."""
        runs: list[tuple[int, int]] = []
        for index, entry in enumerate(entries):
            if not runs or runs[-1][0] != entry.block:
                runs.append((entry.block, index))
        starts = [start for _, start in runs] + [len(entries)]
        result: list[tuple[Entry, int]] = []
        for at, (block, start) in enumerate(runs):
            own = entries[start : starts[at + 1]]
            named = [(entry, name(entry.number)) for entry in own]
            if block != self.middle:
                result += named
                continue
            if at == 0 or at + 1 == len(runs):
                raise Unequal
            step = runs[at + 1][0] - block
            before = entries[starts[at - 1] : start]
            if abs(step) != 1 or runs[at - 1][0] != block - step:
                raise Unequal
            if [(e.type, e.traffic) for e in before] != [(e.type, e.traffic) for e in own]:
                raise Unequal
            news = range(self.middle + 1, self.middle + 1 + self.missing)
            more = [(entry, self.copy_of(entry.number, new)) for new in news[::step] for entry in own]
            result += [*named, *more] if step > 0 else [*more, *named]
        return result

    def _joined(
        self, kernel: Kernel, inputs: list[tuple[Entry, int]], outputs: list[tuple[Entry, int]]
    ) -> list[tuple[Entry, int]]:
        """Return the result of a list of inputs that became longer."""
        entry, number = outputs[0]
        if self.stretched.get(entry.number) != (len(kernel.inputs), len(inputs)):
            raise Unequal
        return [(entry.stretched(len(kernel.inputs), len(inputs)), number)]

    def find_stretched(self) -> dict[int, tuple[int, int]]:
        """Return the storages of vectors with one element for each of a list, and how long they were and become."""
        found: dict[int, tuple[int, int]] = {}
        for record, used in zip(self.trace.records, self.trace.operands, strict=True):
            if used is None or not isinstance(record, Kernel) or len(used.outputs) != 1:
                continue
            shape, result = record.outputs[0].shape, used.outputs[0]
            if record.op in _JOINS and shape[:1] == (len(used.inputs),) and self._spans(record, used):
                more = sum(self.owners.get(number, NONE) == self.middle for number in used.inputs)
                found[result] = shape[0], shape[0] + more * self.missing
            for number in used.inputs:
                if number in found and shape == (found[number][0],):
                    found[result] = found[number]
        return found

    def _stretched_sides(
        self, inputs: list[tuple[Entry, int]], outputs: list[tuple[Entry, int]]
    ) -> tuple[list[tuple[Entry, int]], list[tuple[Entry, int]]]:
        """Return inputs and results of a kernel that works on vectors that became longer."""
        for entry, _ in inputs:
            if entry.number in self.stretched and entry.type.shape != self.stretched[entry.number][:1]:
                raise Unequal
        for entry, _ in outputs:
            if entry.number not in self.stretched and entry.type.shape:
                raise Unequal
        return self._stretch(inputs), self._stretch(outputs)

    def _stretch(self, entries: list[tuple[Entry, int]]) -> list[tuple[Entry, int]]:
        return [
            (entry.stretched(*self.stretched[entry.number]) if entry.number in self.stretched else entry, number)
            for entry, number in entries
        ]
