"""Patterns of actions: what an action of a pipeline's stage was seen to do, for those that are not run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import torch

from legoai.cost.pipelines.classes import Action, Class, Waiting
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE, alike
from legoai.cost.trace.records import Free, Record
from legoai.cost.trace.segments import KIND_OF, Instance, Segment
from legoai.runtime.torch_internals.fake_world import DTensorSpec

Own: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The numbers of the storages, collectives and events that an action makes."""

Place: TypeAlias = tuple[Literal["other", "latest", "made", "fixed"], object, int]
"""How a number is told that an action names and does not make: by the slot that it has in another action of the same
micro batch, or in the latest of a kind; by itself, where any other action made it; and by itself, where none did. Slots
in an action of the same micro batch do not count gradients that it leaves for others."""

STORAGE, WORK = range(2)
"""Kinds of numbers, as indices in :data:`~legoai.cost.trace.numbers.KINDS`."""


class UnequalError(BaseException):
    """Actions are not equal, or cannot be seen to be.

    Not an ordinary exception: torch's schedules log those, with all of their actions, before they raise them again.
    """


class OrderError(UnequalError):
    """Another rank does in its order what this one does not, which is seen before anything is done for it."""


class DepthError(BaseException):
    """What stages of few blocks do does not tell what whole ones do; no ordinary exception either."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor with which the schedule goes on.

    Attributes:
        shape: of the local tensor.
        stride: of it.
        dtype: of it.
        spec: of the DTensor whose local tensor it is; None for a plain tensor.
        place: of its storage among those that the action made.
        work: of the collective whose result it is and for which nobody has waited yet; None for none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: DTensorSpec | None
    place: int
    work: int | None


KEPT: Final = "kept"
Gradient: TypeAlias = Result | Literal["kept"] | None
"""What an action leaves where a gradient can wait: what it made, what was there before, or nothing."""


@dataclass(slots=True)
class Pattern:
    """What an action was seen to do.

    Attributes:
        instance: its records.
        outside: how each number is told that it names and does not make.
        results: tensors with which the schedule goes on.
        on_buffers: of a backward, for each input: whether its gradient is that of the buffer in which it was received.
        of_class: its class.
        gradients: what it leaves where gradients of weights wait for later actions.
        apart: the storages of these among those that it makes, which others of its kind do not make: ascending.
        gives_up: the record at which the outputs of the stage are given up; -1 where they are not.
        segments: recorded where the action is not run: all but the end of tensors with which the schedule goes on, two
            where the outputs are given up between them.
    """

    instance: Instance
    outside: tuple[Place, ...]
    results: tuple[Result | None, ...]
    on_buffers: tuple[bool, ...] = ()
    of_class: Class = ()
    gradients: tuple[Gradient, ...] = ()
    apart: tuple[int, ...] = ()
    gives_up: int = -1
    segments: tuple[Segment, ...] = ()

    def equals(self, other: Pattern, tied: Container[int]) -> bool:
        """Whether another one is equal but for the end of tensors with which the schedule goes on, which are tied."""
        mine, theirs = self._told(tied), other._told(tied)
        return (
            (self.results, self.on_buffers, self.gradients) == (other.results, other.on_buffers, other.gradients)
            and [len(numbers) for numbers in self.instance.own] == [len(numbers) for numbers in other.instance.own]
            and len(mine) == len(theirs)
            and all(one[1] == two[1] and alike(one[0], two[0]) for one, two in zip(mine, theirs, strict=True))
        )

    def _told(self, tied: Container[int]) -> list[tuple[Record, object]]:
        return [
            (record, slot if slot >= NONE else self.outside[-2 - slot]) for _, record, slot in self._without_ends(tied)
        ]

    def without_ends(self, tied: Container[int]) -> tuple[Segment, ...]:
        """Return the records but for the end of tensors with which the schedule goes on; see ``segments``."""
        kept: tuple[list[tuple[Record, int]], ...] = ([], [])
        for index, record, slot in self._without_ends(tied):
            kept[0 <= self.gives_up <= index].append((record, slot))
        return tuple(
            Segment(tuple(record for record, _ in pairs), tuple(slot for _, slot in pairs))
            for pairs in kept[: 1 + (self.gives_up >= 0)]
        )

    def _without_ends(self, tied: Container[int]) -> Iterator[tuple[int, Record, int]]:
        instance = self.instance
        for index, (record, slot) in enumerate(zip(instance.segment.records, instance.segment.slots, strict=True)):
            if not (isinstance(record, Free) and instance.number(slot) in tied):
                yield index, record, slot


@dataclass(frozen=True, slots=True)
class Alone:
    """What was done for no micro batch in particular.

    Attributes:
        instance: its records.
        outside: how each number is told that it names and does not make, where that depends on the actions before it.
        waiting: the gradients that it found.
    """

    instance: Instance
    outside: tuple[Place, ...] | None = None
    waiting: Waiting = ("", "")


@dataclass(frozen=True, slots=True)
class Entry:
    """What an instance among the records of a pass stands for.

    Attributes:
        instance: itself.
        action: that was run or, where ``pattern`` is given, written; None for what is done for no micro batch.
        results: tensors with which the schedule goes on.
        on_buffers: of a backward, which of them are gradients of buffers.
        name: of what is done for no micro batch, with its stage.
        pattern: of which it was written.
        operands: of its kernels, by the index of their record.
    """

    instance: Instance
    action: Action | None
    results: tuple[Result | None, ...] = ()
    on_buffers: tuple[bool, ...] = ()
    name: tuple[int, str] = (NONE, "")
    pattern: Pattern | None = None
    operands: Mapping[int, Operands] = field(default_factory=dict)


def storages_of(results: Iterable[Result | None], own: Sequence[Sequence[int]]) -> set[int]:
    """Return the storages of tensors with which the schedule goes on."""
    return {own[STORAGE][item.place] for item in results if item is not None}


def first_end(instance: Instance, storages: Container[int]) -> int:
    """Return the record at which the first of some storages ends; -1 for none."""
    for index, (record, slot) in enumerate(zip(instance.segment.records, instance.segment.slots, strict=True)):
        if isinstance(record, Free) and instance.number(slot) in storages:
            return index
    return -1


def outside_of(instance: Instance) -> Iterator[tuple[int, int]]:
    """Yield the kind and the number of each of those that an instance names and does not make, in their order."""
    seen = 0
    for record, slot in zip(instance.segment.records, instance.segment.slots, strict=True):
        if slot == -2 - seen:
            yield KIND_OF[type(record)], instance.outside[seen]
            seen += 1
