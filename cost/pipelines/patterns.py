"""Patterns of actions: what an action of a pipeline's stage was seen to do, for those that are not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from legoai.cost.pipelines.classes import Action
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.segments import KIND_OF, Instance, Segment
from legoai.runtime.torch_internals.fake_world import DTensorSpec

Own: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The numbers of the storages, collectives and events that an action makes."""

Place: TypeAlias = tuple[Literal["other", "latest", "made", "fixed"], object, int]
"""How a number is told that an action names and does not make: by the slot that it has in another action of the same
micro batch, or in the latest of a kind; by itself, where any other action made it; and by itself, where none did."""

STORAGE, WORK = range(2)
"""Kinds of numbers, as indices in :data:`~legoai.cost.trace.numbers.KINDS`."""


class UnequalError(BaseException):
    """Actions are not equal, or cannot be seen to be.

    Not an ordinary exception: torch's schedules log those, with all of their actions, before they raise them again.
    """


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


@dataclass(slots=True)
class Pattern:
    """What an action was seen to do.

    Attributes:
        instance: its records.
        outside: how each number is told that it names and does not make.
        results: tensors with which the schedule goes on.
        on_buffers: of a backward, for each input: whether its gradient is that of the buffer in which it was received.
        gives_up: the record at which the outputs of the stage are given up; -1 where they are not.
        segments: recorded where the action is not run: all but the end of tensors with which the schedule goes on, two
            where the outputs are given up between them.
    """

    instance: Instance
    outside: tuple[Place, ...]
    results: tuple[Result | None, ...]
    on_buffers: tuple[bool, ...] = ()
    gives_up: int = -1
    segments: tuple[Segment, ...] = ()


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


def outside_of(instance: Instance) -> Iterator[tuple[int, int]]:
    """Yield the kind and the number of each of those that an instance names and does not make, in their order."""
    seen = 0
    for record, slot in zip(instance.segment.records, instance.segment.slots, strict=True):
        if slot == -2 - seen:
            yield KIND_OF[type(record)], instance.outside[seen]
            seen += 1
