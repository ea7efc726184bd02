"""Repeated micro batch of a step.

Two sections of a trace are equal if their records are equal, when every number is described by where it is defined: in
the section itself, in the section before it, or earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from legoai.cost.replay.walk import Unequal
from legoai.cost.trace.editing import EditableTrace, Made, micro_batches
from legoai.cost.trace.numbers import same_apart_from_numbers
from legoai.cost.trace.records import Allocate, Free

_FEWEST: Final = 3
"""Fewest micro batches of a step such that one has neighbours on both sides."""


@dataclass(frozen=True, slots=True)
class RepeatedMicroBatch:
    """A micro batch of a trace that may be repeated any number of times.

    Attributes:
        taken: micro batches of its step.
        start: index of its first record.
        stop: index behind its last record.
        own: numbers that it defines.
        moving: numbers that the previous micro batch defines and this one uses, each with the number of its own that
            the next one uses instead.
    """

    taken: int
    start: int
    stop: int
    own: frozenset[int]
    moving: Mapping[int, int]


def repeated_micro_batch(trace: EditableTrace) -> RepeatedMicroBatch | None:
    """Return the micro batch of the last step that can be repeated; None where the step has too few micro batches.

    A micro batch in the middle can be repeated if the next one equals it, and if all that it allocates is freed by the
    end of the next one. Of three micro batches the next one is the last, which may have more records: those after the
    loop over micro batches.

    Args:
        trace: whole steps, and what is before them; the steps before the last have one micro batch.

    Raises:
        Unequal: the two are not equal.
    """
    *before, marks = micro_batches(trace.records) or [[]]
    if len(marks) < _FEWEST:
        return None
    if any(len(one) > 1 for one in before):
        raise Unequal
    few = len(marks) == _FEWEST
    outer, start, stop = marks[-3:] if few else marks[-4:-1]
    end = min(2 * stop - start, len(trace)) if few else marks[-1]
    moving = _moving(trace, outer, start, stop, end)
    made = _numbers(trace, start, stop, Allocate)
    if not made <= _numbers(trace, start, end, Free):
        raise Unequal
    own = trace.made(start, stop)
    by_making = {made: number for number, made in own.items()}
    return RepeatedMicroBatch(
        len(marks), start, stop, frozenset(own), {number: by_making[made] for number, made in moving.items()}
    )


def _moving(trace: EditableTrace, before: int, first: int, second: int, end: int) -> dict[int, Made]:
    """Compare the records from `first` to `second` with those from `second` to `end`.

    Returns:
        The numbers of the preceding section that the first section uses, each with its definition, where the second
        section uses the corresponding number of the first.
    """
    if end - second != second - first:
        raise Unequal
    outer, one, two = trace.made(before, first), trace.made(first, second), trace.made(second, end)
    moving: dict[int, Made] = {}
    staying: set[int] = set()
    for index in range(first, second):
        other = index + second - first
        if trace.records[index] is not trace.records[other] and not same_apart_from_numbers(
            trace.records[index], trace.records[other]
        ):
            raise Unequal
        mine, theirs = trace.numbers[index], trace.numbers[other]
        if mine in one or theirs in two:
            if one.get(mine) != two.get(theirs):
                raise Unequal
        elif mine == theirs:
            staying.add(mine)
        elif mine in outer and outer[mine] == one.get(theirs):
            moving[mine] = outer[mine]
        else:
            raise Unequal
    if staying & moving.keys():
        raise Unequal
    return moving


def _numbers(trace: EditableTrace, start: int, stop: int, kind: type) -> set[int]:
    """Return the numbers of the records of one type in a range."""
    pairs = zip(trace.records[start:stop], trace.numbers[start:stop], strict=True)
    return {number for record, number in pairs if isinstance(record, kind)}
