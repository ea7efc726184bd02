"""Stages of many equal blocks, of which a few were captured.

What each of a rank's actions did that were run, and what it does between its passes, is repeated for the blocks that
were left out, as the trace of a program without a pipeline is (:mod:`legoai.cost.replay.building`). The actions that
were run stand one after another in an excerpt of the trace; of those that were written only such are there as others
name numbers of. The actions of the whole stages are then taken from the excerpt as it is with all blocks, compared
anew, and written in the order of the schedule (:mod:`legoai.cost.pipelines.other_ranks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.excerpt import FREES, PASS, RESULTS, Excerpt
from legoai.cost.pipelines.other_ranks import Other, items_of_others
from legoai.cost.pipelines.patterns import STORAGE, DepthError, Entry, OrderError, Result, UnequalError, outside_of
from legoai.cost.pipelines.stages import Heard, Pass
from legoai.cost.replay.building import stretched
from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.replay.walk import Unequal
from legoai.cost.simulated.device import backend
from legoai.cost.trace.marks import ACTION, END_ACTION
from legoai.cost.trace.numbers import FIELD
from legoai.cost.trace.records import Allocate, Free, Mark, Record
from legoai.cost.trace.segments import KIND_OF, Instance, Item, first_instance
from legoai.cost.trace.trace import records_of
from legoai.cost.trace.translation import Translation

_BOUNDS: Final = (ACTION, END_ACTION)


@dataclass(slots=True)
class Told:
    """What is told of a pipeline's ranks from what was captured of one.

    Attributes:
        own: the items of the one with all of its blocks; none where all were captured.
        others: of each rank that is like it and can be told: its coordinate, its items and the translation to it.
    """

    own: Sequence[Item] = ()
    others: list[tuple[int, Sequence[Item], Translation]] = field(default_factory=list)

    def tell(self, heard: Heard, runs: Sequence[RepeatedBlocks], own: Other, others: Sequence[Other]) -> None:
        """Tell what can be told, behind the steps of the rank.

        Args:
            heard: of the rank.
            runs: blocks that were left out.
            own: the rank, as one that is like itself.
            others: ranks that are like it.

        Raises:
            DepthError: it cannot be told what the rank does with all blocks.
        """
        if runs:
            self.own = items_of_whole(heard, runs, own)
        for other in others:
            try:
                ((items, translation),) = items_of_others(heard, [other])
            except OrderError:
                continue
            except UnequalError:  # amid its pass, of which the schedule knows still
                break
            self.others.append((other.coordinate, items, translation))


def items_of_whole(heard: Heard, runs: Sequence[RepeatedBlocks], own: Other) -> tuple[Item, ...]:
    """Return the items of the trace of a rank of whose stages few blocks were captured.

    Those of other ranks can be told then as if all blocks had been captured.

    Args:
        heard: of the rank, which has taken its steps.
        runs: blocks that were left out.
        own: the rank, as one that is like itself.

    Raises:
        DepthError: it cannot be said.
    """
    try:
        living = _deepen(heard, runs)
        heard.restore_buffers()
        ((items, _),) = items_of_others(heard, [own])
    except UnequalError as error:
        raise DepthError(str(error)) from error
    if len(_living(items)) != living:
        raise DepthError("blocks that were left out leave what others do not")
    heard.repeats.numbers.clear()
    return items


def _deepen(heard: Heard, runs: Sequence[RepeatedBlocks]) -> int:
    """Put what the whole stages of a rank do in the place of what was recorded of few of their blocks.

    The passes are empty then, and are to be written.

    Returns:
        How many storages are there in the end.

    Raises:
        UnequalError: it cannot be said what they do.
    """
    recorder, repeats = heard.recorder, heard.repeats
    if len(heard.passes) % recorder.step or not repeats.entries:
        raise UnequalError("steps of different numbers of passes, or of few micro batches")
    excerpt = Excerpt(recorder, repeats, heard.passes)
    try:
        items, repeated = stretched(excerpt.trace, runs)
    except Unequal as error:
        raise UnequalError("the blocks of a stage are not equal") from error
    whole = _Whole(items, excerpt.entries)
    living = _living(recorder.records)
    left_out = sum(one.missing * len(one.storages_of_middle() & living) for one in repeated)
    passes = [
        recorder.records[item.prepared if not index else item.begin : item.end]
        for index, item in enumerate(heard.passes)
    ]
    _retake(repeats, passes, whole)
    records: list[Item] = []
    places = []
    for between in whole.between:
        places.append(len(records))
        records += between
    recorder.records = records
    heard.passes[:] = [Pass(place, place, place) for place in places[1:]]
    storages, works, events = whole.largest
    recorder.storage_count = max(recorder.storage_count, storages + 1)
    recorder.work_count = max(recorder.work_count, works + 1)
    backend.events = max(backend.events, events + 1)
    return len(living) + left_out


def _living(items: Sequence[Item]) -> set[int]:
    """Return the storages that are there behind some items."""
    living: set[int] = set()
    slots: dict[int, tuple[list[int], list[int]]] = {}
    for item in items:
        if isinstance(item, Instance):
            segment = item.segment
            if id(segment) not in slots:
                pairs = list(zip(segment.records, segment.slots, strict=True))
                made, ended = ([slot for record, slot in pairs if isinstance(record, of)] for of in (Allocate, Free))
                slots[id(segment)] = made, ended
            made, ended = slots[id(segment)]
            living.update(map(item.number, made))
            living.difference_update(map(item.number, ended))
        elif isinstance(item, Allocate):
            living.add(item.storage)
        elif isinstance(item, Free):
            living.discard(item.storage)
    return living


class _Whole:
    """The excerpt as it is with all blocks.

    Attributes:
        between: what is before, between and behind the passes.
        actions: what the instances of the excerpt are with all blocks, by their identity, and the results of each.
        largest: the largest number of each kind.
    """

    def __init__(self, items: Sequence[Item], entries: Sequence[Entry]) -> None:
        self.between: list[list[Record]] = [[]]
        self.actions: dict[int, tuple[Instance, tuple[Result | None, ...]]] = {}
        self.largest = [0, 0, 0]
        left = iter(entries)
        done: list[Record] = []
        current = self.between[0]
        for record in records_of(items):
            if not (isinstance(record, Mark) and record.name.startswith(_BOUNDS)):
                current.append(record)
                if (kind := KIND_OF.get(type(record))) is not None:
                    self.largest[kind] = max(self.largest[kind], getattr(record, FIELD[type(record)]))
            elif record.name == PASS:
                self.between.append(current := [])
            elif record.name == RESULTS:
                done, current = current, []
            elif record.name.startswith(END_ACTION):
                entry, instance = next(left), first_instance(done)
                self.actions[id(entry.instance)] = instance, tuple(_results(entry, instance, iter(current)))
                current = self.between[-1]
            elif record.name != FREES:
                current = []


def _results(entry: Entry, instance: Instance, named: Iterator[Record]) -> Iterator[Result | None]:
    """Yield the results of an action as they are in the instance of all blocks.

    Args:
        entry: of the action.
        instance: with all blocks.
        named: records that name the numbers of the results.
    """
    for result in entry.results:
        if result is None:
            yield None
            continue
        place = _place(instance, next(named))
        work = None if result.work is None else _place(instance, next(named))
        yield dataclasses.replace(result, place=place, work=work)


def _place(instance: Instance, record: Record) -> int:
    """Return the place of a record's number among those of its kind that an instance makes."""
    return instance.own[KIND_OF[type(record)]].index(getattr(record, FIELD[type(record)]))


def _retake(repeats: Repeats, passes: Sequence[Sequence[Item]], whole: _Whole) -> None:
    """Take what was run anew, with all blocks."""
    each = len(passes) // repeats.recorder.step
    anew = Repeats(repeats.recorder, repeats.micro_batches, repeats.freed)
    anew.orders, anew.classes = repeats.orders, repeats.classes
    for index, items in enumerate(passes):
        anew.clear(index // each + 1, index % each)
        sums = _sums(repeats, items, whole)
        for item in items:
            entry = repeats.entries.get(id(item))
            if entry is None:
                continue
            instance, results = whole.actions.get(id(item), (None, ()))
            own = () if instance is None else instance.own[STORAGE]
            apart = tuple(place for place, number in enumerate(own) if number in sums)
            if instance is not None and entry.action is not None:
                anew.numbers[anew.step, anew.passes, entry.action] = instance.own
            if entry.pattern is not None:
                assert entry.action is not None
                anew.pass_over(entry.action, instance, results, apart)
                continue
            assert instance is not None
            if entry.action is None:
                stage, name = entry.name
                anew.take_alone(stage, name, instance)
            else:
                anew.take(entry.action, instance, results, entry.on_buffers, apart=apart)
    repeats.patterns, repeats.firsts, repeats.alone = anew.patterns, anew.firsts, anew.alone
    repeats.numbers = anew.numbers
    repeats.tied |= anew.tied


def _sums(repeats: Repeats, items: Sequence[Item], whole: _Whole) -> set[int]:
    """Return the storages of the gradients that a pass sums in another type: those that their reduction gives up."""
    reductions = [
        whole.actions[id(item)][0]
        for item in items
        if (entry := repeats.entries.get(id(item))) is not None
        and entry.name[1] == "REDUCE_GRAD"
        and entry.name[0] in repeats.classes.summed
    ]
    return {number for reduction in reductions for kind, number in outside_of(reduction) if kind == STORAGE}
