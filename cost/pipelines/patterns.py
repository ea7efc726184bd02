"""Patterns: the recorded ops of an executed action, from which other actions of its class are replayed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import torch

from legoai.cost.pipelines.action_classes import Action, Class, Waiting
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE, same_apart_from_numbers
from legoai.cost.trace.records import Free, Record
from legoai.cost.trace.segments import KIND_OF, Instance, Segment
from legoai.runtime.torch_internals.distributed.fake_world import DTensorSpec

Own: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The numbers of the storages, collectives and events that an action defines."""

Place: TypeAlias = tuple[Literal["other", "latest", "made", "fixed"], object, int]
"""Reference to a number that an action uses and does not define. `other`: a slot of another action of the same micro
batch, not counting gradients that that action leaves for others; `latest`: a slot of the latest action of a series;
`made`: the number itself, which some other action defined; `fixed`: the number itself, which no action defined."""

STORAGE, WORK = range(2)
"""Kinds of numbers, as indices in :data:`~legoai.cost.trace.numbers.KINDS`."""


class UnequalError(BaseException):
    """Actions are not equal, or their equality cannot be checked.

    Not a subclass of Exception: torch's schedules log those, with all of their actions, before raising them again.
    """


class OrderError(UnequalError):
    """Another rank's order has an action without a counterpart; raised before anything is replayed for that rank."""


class DepthError(BaseException):
    """The trace with all blocks cannot be derived from that with few; not a subclass of Exception, as above."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that an action hands to the schedule: an output, a loss or a gradient.

    Attributes:
        shape: of the local tensor.
        stride: of the local tensor.
        dtype: of the local tensor.
        spec: of the DTensor whose local tensor it is; None for a plain tensor.
        place: index of its storage among those that the action defines.
        work: index of the collective that produces it, where that has not been waited for; None for none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: DTensorSpec | None
    place: int
    work: int | None


KEPT: Final = "kept"
Gradient: TypeAlias = Result | Literal["kept"] | None
"""What an action leaves as the unsharded gradient of a parameter: its own, the previous one (`kept`), or none."""


@dataclass(slots=True)
class Pattern:
    """Recorded ops of an executed action.

    Attributes:
        instance: its records.
        outside: references to the numbers that it uses and does not define.
        results: tensors that it hands to the schedule.
        on_buffers: for a backward, whether each input's gradient is the `.grad` of the buffer of that input.
        of_class: its class.
        gradients: the unsharded weight gradients that it leaves for later actions.
        apart: slots of the storages of these gradients, which other actions of its kind do not allocate: ascending.
        releases: index of the record at which the stage's outputs are released; -1 where they are not.
        segments: the records that a replay writes, without the ends of results; two segments where the outputs are
            released in between.
    """

    instance: Instance
    outside: tuple[Place, ...]
    results: tuple[Result | None, ...]
    on_buffers: tuple[bool, ...] = ()
    of_class: Class = ()
    gradients: tuple[Gradient, ...] = ()
    apart: tuple[int, ...] = ()
    releases: int = -1
    segments: tuple[Segment, ...] = ()

    def equals(self, other: Pattern, tied: Container[int]) -> bool:
        """Whether two patterns are equal, apart from the ends of results (storages in ``tied``)."""
        mine, theirs = self._compared(tied), other._compared(tied)
        return (
            (self.results, self.on_buffers, self.gradients) == (other.results, other.on_buffers, other.gradients)
            and [len(numbers) for numbers in self.instance.own] == [len(numbers) for numbers in other.instance.own]
            and len(mine) == len(theirs)
            and all(
                one[1] == two[1] and same_apart_from_numbers(one[0], two[0])
                for one, two in zip(mine, theirs, strict=True)
            )
        )

    def _compared(self, tied: Container[int]) -> list[tuple[Record, object]]:
        return [
            (record, slot if slot >= NONE else self.outside[-2 - slot]) for _, record, slot in self._without_ends(tied)
        ]

    def without_ends(self, tied: Container[int]) -> tuple[Segment, ...]:
        """Return the records without the ends of results; see ``segments``."""
        kept: tuple[list[tuple[Record, int]], ...] = ([], [])
        for index, record, slot in self._without_ends(tied):
            kept[0 <= self.releases <= index].append((record, slot))
        return tuple(
            Segment(tuple(record for record, _ in pairs), tuple(slot for _, slot in pairs))
            for pairs in kept[: 1 + (self.releases >= 0)]
        )

    def _without_ends(self, tied: Container[int]) -> Iterator[tuple[int, Record, int]]:
        instance = self.instance
        for index, (record, slot) in enumerate(zip(instance.segment.records, instance.segment.slots, strict=True)):
            if not (isinstance(record, Free) and instance.number(slot) in tied):
                yield index, record, slot


@dataclass(frozen=True, slots=True)
class StageAction:
    """An action that belongs to no micro batch: UNSHARD, RESHARD, REDUCE_GRAD, or the wait for an UNSHARD.

    Attributes:
        instance: its records.
        outside: references to the numbers that it uses and does not define, where they depend on earlier actions.
        waiting: the gradients that wait before it.
    """

    instance: Instance
    outside: tuple[Place, ...] | None = None
    waiting: Waiting = ("", "")


@dataclass(frozen=True, slots=True)
class Entry:
    """Description of an instance among the records of a pass.

    Attributes:
        instance: the instance.
        action: that was executed or, where ``pattern`` is given, replayed; None if it belongs to no micro batch.
        results: tensors that it hands to the schedule.
        on_buffers: for a backward, whether each result is the `.grad` of the buffer of its input.
        name: stage and name of an action that belongs to no micro batch.
        pattern: from which it was replayed.
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
    """Return the storages of results."""
    return {own[STORAGE][item.place] for item in results if item is not None}


def first_end(instance: Instance, storages: Container[int]) -> int:
    """Return the index of the record at which the first of some storages ends; -1 for none."""
    for index, (record, slot) in enumerate(zip(instance.segment.records, instance.segment.slots, strict=True)):
        if isinstance(record, Free) and instance.number(slot) in storages:
            return index
    return -1


def outside_of(instance: Instance) -> Iterator[tuple[int, int]]:
    """Yield kind and number of each number that an instance uses and does not define, in order of first use."""
    seen = 0
    for record, slot in zip(instance.segment.records, instance.segment.slots, strict=True):
        if slot == -2 - seen:
            yield KIND_OF[type(record)], instance.outside[seen]
            seen += 1
