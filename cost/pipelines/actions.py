"""Replay of equal actions of a pipeline's stages.

The whole schedule runs, with every send, receive and wait; only computation that repeats is left out. Actions are
sorted into classes (:mod:`legoai.cost.pipelines.action_classes`). The first and the last action of each class are
executed in the first step, and the first action of each kind in the second step, together with all other actions of the
same micro batches. The first action of a class is its pattern. For an action that is not executed, the records of its
pattern are written with new numbers, and its results (the tensors that it hands to the schedule, for example to be
sent) are fake tensors. The last action of a class must equal the pattern. Otherwise :class:`UnequalError` is raised,
and the pipeline is captured again with more classes, or with every action executed. Before an action is executed, the
unsharded gradients that earlier actions leave are put in place (:mod:`legoai.cost.pipelines.gradients`).

A pattern identifies each storage that it uses by the action that allocated it: the action itself, another action of the
same micro batch, the latest action of a class in any micro batch, or none. The lifetime of a result is not part of the
pattern; its end is recorded when the schedule releases it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from legoai.cost.pipelines.action_classes import FIRST, Action, Class, Classes, first_micro_batches
from legoai.cost.pipelines.gradients import Gradients
from legoai.cost.pipelines.patterns import (
    STORAGE,
    Entry,
    Gradient,
    Own,
    Pattern,
    Place,
    Result,
    StageAction,
    UnequalError,
    first_end,
    outside_of,
    storages_of,
)
from legoai.cost.pipelines.tensors import Tensors
from legoai.cost.simulated.device import backend
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE
from legoai.cost.trace.segments import Instance, first_instance
from legoai.cost.trace.trace import records_of
from legoai.runtime.torch_internals.distributed.units import freed_after_forward

FEWEST: Final = 5
"""Fewest micro batches of a pass for which actions are replayed; with fewer, every action is executed."""


@dataclass(slots=True)
class Repeats:
    """The executed actions of a rank, their patterns, and the replay of all other actions.

    Args:
        recorder: of the rank.
        micro_batches: of a pass.
        freed: whether to assume that parameters are resharded after each forward, which makes more classes of actions.
    """

    recorder: Capture
    micro_batches: int
    freed: bool = False
    orders: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """The micro batches of each kind of action of each stage, in the order of a pass."""
    compared: dict[int, set[int]] = field(default_factory=dict)
    """For each stage, the micro batches of the first and the last action of each class in a pass."""
    classes: Classes = field(default_factory=lambda: Classes({}, False))
    step: int = 0
    passes: int = 0
    patterns: dict[tuple[int, str, Class], Pattern] = field(default_factory=dict)
    made: dict[Action, Instance] = field(default_factory=dict)
    """The instance of each action of this pass."""
    maker: dict[tuple[int, int], tuple[Action, int]] = field(default_factory=dict)
    """For each kind and number: the executed action that defines the number, and the slot of the number there."""
    written: list[tuple[int, Action]] = field(default_factory=list)
    """The first storage of each replayed action, ascending."""
    latest: dict[tuple[int, str, str], int] = field(default_factory=dict)
    """The micro batch of the latest action of each series (see ``_series``)."""
    persistent: set[tuple[int, int]] = field(default_factory=set)
    """Kind and number of what an action defined and patterns of later passes use under that same number."""
    tied: set[int] = field(default_factory=set)
    """Storages of results. Their ends are recorded when the schedule releases them."""
    outputs: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """The storages of a stage's outputs, by stage and micro batch."""
    firsts: dict[tuple[int, int, int, str], Pattern] = field(default_factory=dict)
    """The first action of each kind in each pass, by step, pass, stage and kind."""
    stage_actions: dict[tuple[int, int, int, str], list[StageAction]] = field(default_factory=dict)
    """Actions that belong to no micro batch, by step, pass, stage and name."""
    apart: dict[Action, tuple[int, ...]] = field(default_factory=dict)
    """For actions that leave gradients to other micro batches: the slots of the gradients' storages, ascending."""
    tensors: Tensors = field(init=False)
    gradients: Gradients = field(init=False)
    replays: bool = False
    """Whether every action is replayed and none is executed."""
    gathered: set[int] = field(default_factory=set)
    """Stages whose replayed all-gather has not been waited for yet."""
    replayed: Counter[tuple[int, int, int, str]] = field(default_factory=Counter)
    numbers: dict[tuple[int, int, Action], Own] = field(default_factory=dict)
    """Known numbers of actions that are to be replayed, by step, pass and action."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """The entry of each instance among the records, by the identity of the instance."""

    def __post_init__(self) -> None:
        self.tensors = Tensors(self.recorder)
        self.gradients = Gradients(self.tensors)

    def begin_pass(self) -> None:
        """Begin the next pass.

        Raises:
            UnequalError: a storage that patterns use under a fixed number has ended.
        """
        living = {(STORAGE, item.number) for item in self.recorder.storages.values()} if self.persistent else set()
        if not self.persistent <= living:
            raise UnequalError("an action uses a storage of another action, which has ended before the next pass")
        self.clear(self.recorder.step, self.passes + 1 if self.step == self.recorder.step else 0)

    def clear(self, step: int, passes: int) -> None:
        """Reset the state of a pass, given the step and the index in it of the pass that begins."""
        self.step, self.passes = step, passes
        self.made.clear()
        self.apart.clear()
        self.maker.clear()
        self.written.clear()
        self.latest.clear()
        self.classes = Classes(self.classes.firsts, self.freed, self.classes.summed)
        self.outputs.clear()
        self.replayed.clear()

    def set_order(self, actions: Iterable[Action]) -> None:
        """Set the order of the compute actions of a pass."""
        listed = list(actions)
        for stage, kind, micro_batch in listed:
            self.orders.setdefault((stage, kind), []).append(micro_batch)
        halves = any(kind == "W" for _, kind, _ in listed)
        summed = frozenset(self.gradients.parameters) if halves and not self.freed else ()
        self.classes = Classes(first_micro_batches(listed), self.freed, summed)
        of_class: dict[tuple[int, str, Class], list[int]] = {}
        for action in listed:
            of_class.setdefault((*action[:2], self.classes.enter(action)), []).append(action[2])
        for (stage, *_), of_one in of_class.items():
            self.compared.setdefault(stage, set()).update((of_one[0], of_one[-1]))

    def executes(self, stage: int, micro_batch: int) -> bool:
        """Whether the actions of a micro batch are executed in this pass."""
        if self.replays:
            return False
        if self.micro_batches < FEWEST:
            return True
        if self.step == 1 and not self.passes and micro_batch in self.compared[stage]:
            return True
        return any(other == stage and micro_batch == order[0] for (other, _), order in self.orders.items())

    def unshard_or_reshard(self, stage: int, model: nn.Module) -> None:
        """Unshard or reshard the parameters of a stage, as all actions before the next one would have left them.

        Raises:
            UnequalError: after forward, some parameters are sharded over fewer ranks rather than fully resharded.
        """
        if not self.freed or self.micro_batches < FEWEST or not any(of == stage for of, *_ in self.made):
            return
        units = freed_after_forward(model)
        if units is None:
            raise UnequalError("after forward, parameters are sharded over fewer ranks")
        records = self.recorder.records
        start, before, self.recorder.paused = len(records), self.recorder.paused, True
        try:
            for unit in units:
                unit.unshard() if self.classes.holds(stage) else unit.reshard()
        finally:
            self.recorder.paused = before
            del records[start:]

    def add_executed(
        self, action: Action, start: int, results: Iterable[Any], on_buffers: tuple[bool, ...] = ()
    ) -> None:
        """Add an executed action: as the pattern of its class, or in comparison with that pattern.

        Args:
            action: the action.
            start: index of its first record.
            results: tensors that it hands to the schedule.
            on_buffers: for a backward, whether each result is also the `.grad` of the buffer of its input.
        """
        if self.micro_batches < FEWEST:
            return
        instance, operands = self._compacted(start)
        described = tuple(self.tensors.describe(item, instance) for item in results)
        left = self.gradients.add_executed(action[0], instance) if self.classes.leaves_gradients(action) else ()
        self.entries[id(instance)] = Entry(instance, action, described, on_buffers, operands=operands)
        apart = tuple(sorted(item.place for item in left if isinstance(item, Result)))
        self.add(action, instance, described, on_buffers, left=left, apart=apart)

    def add(
        self,
        action: Action,
        instance: Instance,
        described: tuple[Result | None, ...],
        on_buffers: tuple[bool, ...],
        *,
        left: tuple[Gradient, ...] = (),
        apart: tuple[int, ...] = (),
    ) -> None:
        """Make an action the pattern of its class, or compare it with that pattern."""
        stage, kind, micro_batch = action
        found = self.classes.enter(action)
        self.made[action] = instance
        outside = tuple(self._place(of, number, micro_batch) for of, number in outside_of(instance))
        self._made(action, instance, apart)
        self.tied |= storages_of(described, instance.own)
        pattern = Pattern(instance, outside, described, on_buffers, found, left, apart)
        if kind == "F":
            self.outputs[stage, micro_batch] = storages_of(described, instance.own)
        pattern.releases = first_end(instance, self.outputs.get((stage, micro_batch), set()))
        self.latest[self._series(action)] = micro_batch
        if micro_batch == self._first(stage, kind):
            self.firsts[self.step, self.passes, stage, kind] = pattern
            return
        known = self.patterns.get((stage, kind, found))
        if known is None:
            self.patterns[stage, kind, found] = pattern
        elif not known.equals(pattern, self.tied):
            raise UnequalError(f"action {stage}{kind}{micro_batch} differs from earlier actions of its class")

    def advance(
        self,
        action: Action,
        instance: Instance | None,
        described: tuple[Result | None, ...],
        apart: tuple[int, ...] = (),
    ) -> None:
        """Advance past an action that was replayed in an earlier run; ``instance`` holds its numbers where known."""
        self.classes.enter(action)
        self.latest[self._series(action)] = action[2]
        if instance is not None:
            self._made(action, instance, apart)
            self.tied |= storages_of(described, instance.own)

    def _made(self, action: Action, instance: Instance, apart: tuple[int, ...]) -> None:
        self.apart[action] = apart
        for of, numbers in enumerate(instance.own):
            self.maker.update({(of, number): (action, place * 3 + of) for place, number in enumerate(numbers)})

    def _series(self, action: Action) -> tuple[int, str, str]:
        """The series of an action, a kind or own class; later actions may use what the latest of a series defined."""
        stage, kind, micro_batch = action
        if not self.freed and (kind == "F" or stage not in self.classes.summed):
            return stage, kind, ""
        return stage, kind, self.classes.found[stage, "F" if kind == "L" else kind, micro_batch][0]

    def _first(self, stage: int, kind: str) -> int:
        """The micro batch of the first action of a kind in each pass."""
        return self.orders[stage, "F" if kind == "L" else kind][0]

    def run_stage_action(self, stage: int, name: str, run: Callable[[], object]) -> None:
        """Execute an action that belongs to no micro batch, or replay it."""
        if self.replays:
            self.replay_stage_action(stage, name)
            return
        start = len(self.recorder.records)
        if name == "REDUCE_GRAD":
            self.gradients.restore(stage)
        run()
        self.record_stage_action(stage, name, start)

    def record_stage_action(self, stage: int, name: str, start: int) -> None:
        """Add the records from an index on as an action that belongs to no micro batch."""
        if self.micro_batches >= FEWEST:
            instance, operands = self._compacted(start)
            self.entries[id(instance)] = Entry(instance, None, name=(stage, name), operands=operands)
            self.add_stage_action(stage, name, instance)
            if name == "REDUCE_GRAD" and stage in self.classes.summed:
                self.gradients.add_executed(stage, instance)
                if self.gradients.any_left(stage):
                    raise UnequalError("unsharded gradients remain after a pass")

    def add_stage_action(self, stage: int, name: str, instance: Instance) -> None:
        """Add an action that belongs to no micro batch."""
        alone = StageAction(instance)
        if name == "REDUCE_GRAD" and stage in self.classes.summed:
            outside = tuple(self._place(of, number, NONE) for of, number in outside_of(instance))
            alone = StageAction(instance, outside, self.classes.waiting(stage))
        self.stage_actions.setdefault((self.step, self.passes, stage, name), []).append(alone)

    def _compacted(self, start: int) -> tuple[Instance, dict[int, Operands]]:
        """Replace the records from an index on by one instance; return it and the operands of its kernels."""
        records, operands = self.recorder.records, self.recorder.operands
        instance = first_instance(list(records_of(records[start:])))
        used = {}
        if operands is not None:
            if any(isinstance(item, Instance) for item in records[start:]):
                raise UnequalError("the records of one action contain another action")
            behind = list(itertools.takewhile(lambda index: index >= start, reversed(operands)))
            used = {index - start: operands.pop(index) for index in behind}
        records[start:] = [instance]
        return instance, used

    def replay_stage_action(self, stage: int, name: str) -> None:
        """Replay the action of the same name and index that was recorded in the same pass."""
        key = self.step, self.passes, stage, name
        place, known = self.replayed[key], self.stage_actions.get(key, [])
        if place == len(known):
            raise UnequalError(f"{name} of stage {stage} occurs more often than it was recorded")
        self.replayed[key] += 1
        alone = known[place]
        instance = alone.instance
        if alone.outside is not None:
            instance = replace(instance, outside=tuple(self._number((stage, "", NONE), it) for it in alone.outside))
        self.recorder.records.append(instance)

    def _place(self, kind: int, number: int, micro_batch: int) -> Place:
        """Return a reference to a number that an action uses and does not define."""
        found = self.maker.get((kind, number)) or self._writer(kind, number)
        if found is not None:
            (stage, name, other), slot = found
            if other == micro_batch:
                before = bisect.bisect_left(self.apart.get(found[0], ()), slot // 3) if kind == STORAGE else 0
                return "other", (stage, name), slot - 3 * before
            latest = self._series(found[0])
            # Storages that the first action defines may persist from pass to pass: unsharded parameters do.
            stays = self.freed and latest[-1] == FIRST and kind == STORAGE
            if other == self.latest.get(latest) and not stays:
                return "latest", latest, slot
            self.persistent.add((kind, number))
            return "made", found[0], number
        return "fixed", None, number

    def _writer(self, kind: int, number: int) -> tuple[Action, int] | None:
        """Return the replayed action that defines a number, and the slot of the number there."""
        if kind == STORAGE:
            place = bisect.bisect_right(self.written, number, key=lambda item: item[0]) - 1
            candidates = self.written[max(0, place) : place + 1]
        else:
            candidates = self.written
        for _, action in candidates:
            numbers = self.made[action].own[kind]
            if number in numbers:
                return action, numbers.index(number) * 3 + kind
        return None

    def replay(self, action: Action, release: Callable[[], object]) -> list[torch.Tensor | None]:
        """Replay an action, and return the tensors that it hands to the schedule.

        Args:
            action: the action.
            release: releases the outputs of the stage; called where the action does so.
        """
        stage, kind, micro_batch = action
        first = self.replays and micro_batch == self._first(stage, kind)
        found = self.classes.enter(action)
        pattern = self._pattern(action, found)
        pattern.segments = pattern.segments or pattern.without_ends(self.tied)
        own = pattern.instance.own if first else self._own(action, pattern.instance)
        outside = tuple(self._number(action, place) for place in pattern.outside)
        if own[STORAGE] and not self.replays:
            self.written.append((own[STORAGE][0], action))
        instances = [Instance(segment, own, outside) for segment in pattern.segments]
        if not self.replays:
            self.entries[id(instances[0])] = Entry(instances[0], action, pattern.results, pattern=pattern)
            if self.classes.leaves_gradients(action):
                self.gradients.add_replayed(stage, pattern.gradients, own)
        self.recorder.records.append(instances[0])
        if pattern.releases >= 0:
            release()
            self.recorder.records.append(instances[1])
        self.made[action], self.apart[action] = instances[0], pattern.apart
        if kind == "F":
            self.outputs[stage, micro_batch] = storages_of(pattern.results, own)
        self.latest[self._series(action)] = micro_batch
        return [None if item is None else self.tensor(item, own) for item in pattern.results]

    def _pattern(self, action: Action, of_class: Class) -> Pattern:
        """The pattern from which an action is replayed."""
        stage, kind, micro_batch = action
        if self.replays and micro_batch == self._first(stage, kind):
            found = self.firsts.get((self.step, self.passes, stage, kind))
            other = not self.numbers  # another rank than the captured one: its actions may have another order
            if found is not None and other and any(of in ("latest", "made") for of, *_ in found.outside):
                raise UnequalError(f"the first {kind} of stage {stage} uses what another action left")
        else:
            found = self.patterns.get((stage, kind, of_class))
        if found is None:
            raise UnequalError(f"{kind} of stage {stage} has no pattern yet")
        return found

    def covers(self, actions: Sequence[Action]) -> bool:
        """Whether patterns cover all waiting gradients from which actions of a pass in another order start."""
        summed = self.classes.summed
        classes = Classes(first_micro_batches(actions), self.freed, summed)
        found = {(*action[:2], classes.enter(action)) for action in actions if action[0] in summed}
        known = {(*key[2:], pattern.of_class) for key, pattern in self.firsts.items()} | self.patterns.keys()
        return found <= known and all(
            alone.waiting == classes.waiting(stage)
            for (*_, stage, name), several in self.stage_actions.items()
            if name == "REDUCE_GRAD" and stage in summed
            for alone in several
        )

    def on_buffers(self, action: Action) -> tuple[bool, ...]:
        """For each input of a replayed backward, whether its gradient is the `.grad` of the input's buffer."""
        return self._pattern(action, self.classes.found[action]).on_buffers

    def _number(self, action: Action, place: Place) -> int:
        of, other, slot = place
        if of in ("made", "fixed"):
            return slot
        assert isinstance(other, tuple)
        micro_batch = action[2] if of == "other" else self.latest.get(other)
        made = None if micro_batch is None else self.made.get((*other[:2], micro_batch))
        if made is None:
            raise UnequalError(f"{other[1]} of stage {other[0]} is later than for other micro batches")
        if of == "other" and slot % 3 == STORAGE:
            for left in self.apart.get((*other[:2], action[2]), ()):
                slot += 3 * (left <= slot // 3)
        if slot // 3 >= len(made.own[slot % 3]):
            raise UnequalError(f"{other[1]} of stage {other[0]} defines fewer numbers than the first one")
        return made.number(slot)

    def _own(self, action: Action, instance: Instance) -> Own:
        """Return the numbers that a replayed action defines: known ones, since others use them, or new ones."""
        found = self.numbers.get((self.step, self.passes, action))
        if found is None:
            return self._reserved(instance)
        if list(map(len, found)) != list(map(len, instance.own)):
            raise UnequalError("an action defines fewer numbers than others of its class")
        return found

    def _reserved(self, instance: Instance) -> tuple[range, range, range]:
        """Reserve new numbers for a replayed action."""
        recorder = self.recorder
        storages, works, events = (len(numbers) for numbers in instance.own)
        storage, work = recorder.storage_count, recorder.work_count
        recorder.storage_count += storages
        recorder.work_count += works
        event = min([backend.next_event() for _ in range(events)], default=0)
        return range(storage, storage + storages), range(work, work + works), range(event, event + events)

    def tensor(self, item: Result, own: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return a fake tensor on the storage that the records name."""
        self.tied.add(own[STORAGE][item.place])
        return self.tensors.fake(item, own)
