"""Replay of equal micro batches.

Two parts of a trace are equal if their records are, once every number is told by where it was made: in the part
itself, in the part before it, or earlier still.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from legoai.cost.trace.editing import EditableTrace, Section, is_micro_batch, micro_batches
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.numbers import alike
from legoai.cost.trace.records import Allocate, Free, Mark


def repeat_micro_batches(trace: EditableTrace, *, wanted: int) -> EditableTrace | None:
    """Lengthen the steps of a trace to more micro batches.

    A micro batch in the middle of each step is repeated, which is right if the one behind it is equal to it, and if
    what it made is gone when that one ends. Where there are only three, the one behind it is the last; it may be
    longer, by what follows the micro batches.

    Args:
        trace: whole steps, and what is before them. A step of one micro batch stays as it is.
        wanted: micro batches of the others.

    Returns:
        The lengthened trace; None where the two are not equal.
    """
    result = trace
    for marks in micro_batches(trace.records)[::-1]:
        have = len(marks)
        if have in (1, wanted):
            continue
        if have < 3:
            return None
        before, first, second = marks[-3:] if have == 3 else marks[-4:-1]
        end = min(2 * second - first, len(result)) if have == 3 else marks[-1]
        moving = _moving(result, before, first, second, end)
        if moving is None:
            return None
        made = {n for r, n in zip(result.records[first:second], result.numbers[first:second], strict=True)
                if isinstance(r, Allocate)}  # fmt: skip
        dropped = {n for r, n in zip(result.records[first:end], result.numbers[first:end], strict=True)
                   if isinstance(r, Free)}  # fmt: skip
        if not made <= dropped:
            return None
        result = _lengthened(result, first, second, moving, wanted - have)
    return result


def _moving(trace: EditableTrace, before: int, first: int, second: int, end: int) -> dict[int, int] | None:
    """Compare the records from `first` to `second` with those from `second` to `end`.

    Returns:
        The numbers of the part before them that the first names, each with its order, where the second names the same
        one of the first; None where the two are not equal.
    """
    if end - second != second - first:
        return None
    outer, one, two = trace.made(before, first), trace.made(first, second), trace.made(second, end)
    moving: dict[int, int] = {}
    staying: set[int] = set()
    for index in range(first, second):
        other = index + second - first
        if not alike(trace.records[index], trace.records[other]):
            return None
        mine, theirs = trace.numbers[index], trace.numbers[other]
        if mine in one or theirs in two:
            if one.get(mine) != two.get(theirs):
                return None
        elif mine == theirs:
            staying.add(mine)
        elif mine in outer and outer[mine] == one.get(theirs):
            moving[mine] = outer[mine]
        else:
            return None
    return None if staying & moving.keys() else moving


def _lengthened(trace: EditableTrace, first: int, second: int, moving: Mapping[int, int], count: int) -> EditableTrace:
    """Put so many copies of a micro batch behind it."""
    own = list(trace.made(first, second))
    base = max(trace.numbers) // 3 + 1
    part = trace.part(first, second)
    part.sections = [Section(1, second - first)]  # the mark before it has the micro batch's number
    result = trace.part(0, first)
    result.extend(part)
    number = _micro_batch(trace, first)
    current = {n: n for n in own}
    for index in range(count):
        previous = current
        current = {n: (base + index * len(own) + place) * 3 + n % 3 for place, n in enumerate(own)}
        names = current | {n: previous[own[place]] for n, place in moving.items()}
        copy = part.renumbered(functools.partial(_look_up, names))
        copy.records[0] = Mark(f"{MICRO_BATCH}{number + 1 + index}")
        result.extend(copy)
    rest = trace.part(second, len(trace)).renumbered(functools.partial(_look_up, current))
    for index, record in enumerate(rest.records):
        if isinstance(record, Mark) and record.name.startswith("end step "):
            break
        if is_micro_batch(record):
            rest.records[index] = Mark(f"{MICRO_BATCH}{_micro_batch(rest, index) + count}")
    result.extend(rest)
    return result


def _micro_batch(trace: EditableTrace, index: int) -> int:
    record = trace.records[index]
    assert isinstance(record, Mark)
    return int(record.name.removeprefix(MICRO_BATCH))


def _look_up(names: Mapping[int, int], number: int) -> int:
    return names.get(number, number)
