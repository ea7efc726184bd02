"""Excerpt of a pipeline rank's trace: the executed actions, one after another, and the records between the passes.

A replayed action is included only if it defines a number that included records use; its records that use numbers of
replayed actions that are not included are left out.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.patterns import STORAGE, WORK, Entry, UnequalError
from legoai.cost.pipelines.stages import Pass
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.editing import EditableTrace, Operands
from legoai.cost.trace.marks import ACTION, ACTION_APART, BACKWARD_ACTION, END_ACTION, GATHER_APART
from legoai.cost.trace.numbers import FIELD, NONE
from legoai.cost.trace.records import Categorise, Free, Mark, Record, WaitWork
from legoai.cost.trace.segments import KIND_OF, Instance, Item, Segment

PASS: Final = f"{ACTION}pass"
"""Mark before a pass."""
RESULTS: Final = f"{ACTION}results"
"""Mark after an action, before records that name the numbers of its results."""
FREES: Final = f"{ACTION_APART}frees"
"""Mark after the last op of half a backward (I or W), before the frees of the tensors that the blocks saved."""
_FORWARD: Final = f"{ACTION}forward "


class Excerpt:
    """The executed actions of a rank and the records between its passes, each once.

    Attributes:
        trace: the records.
        entries: the actions between marks, in order.
    """

    def __init__(self, recorder: Capture, repeats: Repeats, passes: Sequence[Pass]) -> None:
        self.entries: list[Entry] = []
        self._records: list[Record] = []
        self._operands: list[Operands | None] = []
        items, operands = recorder.records, recorder.operands or {}
        begins = [passes[0].prepared, *(item.begin for item in passes[1:]), len(items)]
        ends = [0, *(item.end for item in passes)]
        between = [range(end, begin) for end, begin in zip(ends, begins, strict=True)]
        inside = [
            [repeats.entries[id(item)] for item in items[begin:end] if id(item) in repeats.entries]
            for begin, end in zip(begins, ends[1:], strict=False)
        ]
        entries = list(itertools.chain.from_iterable(inside))
        named = _named(
            [entry.instance for entry in entries if entry.pattern is None],
            [items[index] for span in between for index in span],
        )
        written = [entry for entry in entries if entry.pattern is not None]
        self._needed = _makers(written, named)
        self._missing = _Made([entry for entry in written if id(entry.instance) not in self._needed])
        for span, of_pass in zip(between, [*inside, None], strict=True):
            for index in span:
                self._add(items[index], operands.get(index))
            if of_pass is not None:
                self._add(Mark(PASS))
                for entry in of_pass:
                    self._enter(entry)
        self.trace = EditableTrace.of(self._records, self._operands)

    def _add(self, record: Item, used: Operands | None = None) -> None:
        if isinstance(record, Instance):
            raise UnequalError("an action between the passes")
        self._records.append(record)
        self._operands.append(used)

    def _enter(self, entry: Entry) -> None:
        """Add the records of an entry between marks, followed by records that name its results."""
        if entry.pattern is not None and id(entry.instance) not in self._needed:
            return
        number = len(self.entries)
        self.entries.append(entry)
        self._add(Mark(f"{_head(entry)}{number}"))
        instance = entry.instance
        if entry.pattern is not None:
            instance = dataclasses.replace(instance, segment=entry.pattern.instance.segment)
        behind = _start_of_trailing_frees(entry, instance.segment)
        for index, (record, slot) in enumerate(zip(instance.records(), instance.segment.slots, strict=True)):
            if index == behind:
                self._add(Mark(FREES))
            if entry.pattern is not None and slot < NONE and self._missing.has(record):
                continue
            self._add(record, entry.operands.get(index))
        self._add(Mark(RESULTS))
        for result in entry.results:
            if result is not None:
                self._add(Categorise(instance.own[STORAGE][result.place], "other", ""))
                if result.work is not None:
                    self._add(WaitWork(0, instance.own[WORK][result.work]))
        self._add(Mark(f"{END_ACTION}{number}"))


def _head(entry: Entry) -> str:
    """Return the beginning of the mark before an entry."""
    if entry.action is None:
        return ACTION_APART if entry.name[1] == "REDUCE_GRAD" else GATHER_APART
    return _FORWARD if entry.action[1] in ("F", "L") else BACKWARD_ACTION


def _start_of_trailing_frees(entry: Entry, segment: Segment) -> int:
    """Return the index after which half a backward only frees storages; NONE for all other entries."""
    if entry.action is None or entry.action[1] not in ("I", "W"):
        return NONE
    behind = len(segment.records)
    while behind and isinstance(segment.records[behind - 1], Free):
        behind -= 1
    return behind


class _Made:
    """The numbers that replayed actions define, which are reserved in ascending ranges."""

    def __init__(self, written: Sequence[Entry]) -> None:
        self.written = written
        self.starts: list[list[tuple[int, int]]] = [
            sorted(
                (entry.instance.own[kind][0], index) for index, entry in enumerate(written) if entry.instance.own[kind]
            )
            for kind in range(3)
        ]

    def maker(self, kind: int, number: int) -> Entry | None:
        """Return the action that defines a number."""
        starts = self.starts[kind]
        place = bisect.bisect_right(starts, (number, len(self.written))) - 1
        if place < 0:
            return None
        entry = self.written[starts[place][1]]
        return entry if number in entry.instance.own[kind] else None

    def has(self, record: Record) -> bool:
        """Whether one of the actions defines the number of a record."""
        return self.maker(KIND_OF[type(record)], getattr(record, FIELD[type(record)])) is not None


def _named(instances: Iterable[Instance], items: Iterable[Item]) -> tuple[set[int], set[int], set[int]]:
    """Return the numbers of each kind that instances use without defining them, and those that single records name."""
    named: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    for instance in instances:
        for slot, kind in instance.segment.outside:
            named[kind].add(instance.number(slot))
    for item in items:
        if (of := KIND_OF.get(type(item))) is not None:
            named[of].add(getattr(item, FIELD[type(item)]))
    return named


def _makers(written: Sequence[Entry], named: Sequence[set[int]]) -> set[int]:
    """Return the identities of the instances of replayed actions that define numbers in use."""
    made = _Made(written)
    return {
        id(entry.instance)
        for kind, numbers in enumerate(named)
        for number in numbers
        if (entry := made.maker(kind, number)) is not None
    }
