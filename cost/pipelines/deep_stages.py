"""Pipeline stages of many repeated blocks, only a few of which were captured.

The records of each executed action, and those between passes, are repeated for the blocks that were left out, as in the
trace of a program without a pipeline (:mod:`legoai.cost.replay.building`). For this the executed actions are copied one
after another into an excerpt of the trace (:mod:`legoai.cost.pipelines.excerpt`). With all blocks, the actions of the
excerpt are compared again, become the patterns, and are replayed in the order of the schedule
(:mod:`legoai.cost.pipelines.other_ranks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.excerpt import FREES, PASS, RESULTS, Excerpt
from legoai.cost.pipelines.other_ranks import EqualRank, items_of_equal_ranks
from legoai.cost.pipelines.patterns import STORAGE, DepthError, Entry, OrderError, Result, UnequalError, outside_of
from legoai.cost.pipelines.stages import Pass, PipelineHooks
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
class DerivedTraces:
    """Traces derived from the capture of one pipeline rank: its own with all blocks, and those of equal ranks.

    Attributes:
        own: items of the captured rank with all of its blocks; empty where all were captured.
        others: for each equal rank whose trace could be derived: its coordinate, its items and the translation to it.
    """

    own: Sequence[Item] = ()
    others: list[tuple[int, Sequence[Item], Translation]] = field(default_factory=list)

    def derive(
        self, hooks: PipelineHooks, runs: Sequence[RepeatedBlocks], own: EqualRank, others: Sequence[EqualRank]
    ) -> None:
        """Derive the traces, after the captured rank has taken its steps.

        Args:
            hooks: of the captured rank.
            runs: repeated blocks of which some were left out.
            own: the captured rank, as a rank equal to itself.
            others: ranks with equal stages.

        Raises:
            DepthError: the trace with all blocks cannot be derived.
        """
        if runs:
            self.own = items_of_all_blocks(hooks, runs, own)
        for other in others:
            try:
                ((items, translation),) = items_of_equal_ranks(hooks, [other])
            except OrderError:
                continue
            except UnequalError:  # the schedule stopped within a pass and cannot run another one
                break
            self.others.append((other.coordinate, items, translation))


def items_of_all_blocks(hooks: PipelineHooks, runs: Sequence[RepeatedBlocks], own: EqualRank) -> tuple[Item, ...]:
    """Return the items of a rank's trace with all blocks, of which few were captured.

    Afterwards traces of other ranks can be derived as if all blocks had been captured.

    Args:
        hooks: of the rank, which has taken its steps.
        runs: repeated blocks of which some were left out.
        own: the rank, as a rank equal to itself.

    Raises:
        DepthError: the trace cannot be derived.
    """
    try:
        living = _deepen(hooks, runs)
        hooks.restore_buffers()
        ((items, _),) = items_of_equal_ranks(hooks, [own])
    except UnequalError as error:
        raise DepthError(str(error)) from error
    if len(_living(items)) != living:
        raise DepthError("blocks that were left out leave storages that captured blocks do not")
    hooks.repeats.numbers.clear()
    return items


def _deepen(hooks: PipelineHooks, runs: Sequence[RepeatedBlocks]) -> int:
    """Replace the records of few blocks by those of all blocks, in patterns and between passes.

    The passes themselves are left empty, to be replayed.

    Returns:
        Number of living storages after the last record.

    Raises:
        UnequalError: the records with all blocks cannot be derived.
    """
    recorder, repeats = hooks.recorder, hooks.repeats
    if len(hooks.passes) % recorder.step or not repeats.entries:
        raise UnequalError("steps of different numbers of passes, or of few micro batches")
    excerpt = Excerpt(recorder, repeats, hooks.passes)
    try:
        items, repeated = stretched(excerpt.trace, runs)
    except Unequal as error:
        raise UnequalError("the blocks of a stage are not equal") from error
    whole = _Whole(items, excerpt.entries)
    living = _living(recorder.records)
    left_out = sum(one.missing * len(one.storages_of_middle() & living) for one in repeated)
    passes = [
        recorder.records[item.prepared if not index else item.begin : item.end]
        for index, item in enumerate(hooks.passes)
    ]
    _retake(repeats, passes, whole)
    records: list[Item] = []
    places = []
    for between in whole.between:
        places.append(len(records))
        records += between
    recorder.records = records
    hooks.passes[:] = [Pass(place, place, place) for place in places[1:]]
    storages, works, events = whole.largest
    recorder.storage_count = max(recorder.storage_count, storages + 1)
    recorder.work_count = max(recorder.work_count, works + 1)
    backend.events = max(backend.events, events + 1)
    return len(living) + left_out


def _living(items: Sequence[Item]) -> set[int]:
    """Return the storages that are alive after some items."""
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
    """The excerpt with all blocks.

    Attributes:
        between: records before, between and after the passes.
        actions: by the identity of an instance of the excerpt: the instance with all blocks, and its results.
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
    """Yield the results of an action, with slots of the instance with all blocks.

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
    """Return the index of a record's number among the numbers of its kind that an instance defines."""
    return instance.own[KIND_OF[type(record)]].index(getattr(record, FIELD[type(record)]))


def _retake(repeats: Repeats, passes: Sequence[Sequence[Item]], whole: _Whole) -> None:
    """Add the executed actions again, with all blocks."""
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
                anew.advance(entry.action, instance, results, apart)
                continue
            assert instance is not None
            if entry.action is None:
                stage, name = entry.name
                anew.add_stage_action(stage, name, instance)
            else:
                anew.add(entry.action, instance, results, entry.on_buffers, apart=apart)
    repeats.patterns, repeats.firsts, repeats.stage_actions = anew.patterns, anew.firsts, anew.stage_actions
    repeats.numbers = anew.numbers
    repeats.tied |= anew.tied


def _sums(repeats: Repeats, items: Sequence[Item], whole: _Whole) -> set[int]:
    """Return the storages of gradients that a pass sums in another dtype: those that their reduction frees."""
    reductions = [
        whole.actions[id(item)][0]
        for item in items
        if (entry := repeats.entries.get(id(item))) is not None
        and entry.name[1] == "REDUCE_GRAD"
        and entry.name[0] in repeats.classes.summed
    ]
    return {number for reduction in reductions for kind, number in outside_of(reduction) if kind == STORAGE}
