"""Replay of equal actions of a pipeline's stages.

The schedule runs whole, with every send, receive and wait; only what a stage computes is left out where it was computed
before. Of each class of actions (:mod:`legoai.cost.pipelines.classes`) the first and the last of the first step are
run, and of each kind the first of the second step, with all that is done to their micro batches. The first of a class
is the pattern: in place of those that are not run its records are written, with numbers of their own, and the tensors
that the schedule goes on with, such as what is sent, stand there without anything having been computed. The last of the
first step, which comes behind others of its class, must come out equal to the pattern. Else :class:`UnequalError` is
raised and the pipeline is to be captured with more classes, or whole. Unsharded gradients that one action leaves for
another are put where they belong before an action is run (:mod:`legoai.cost.pipelines.gradients`).

A storage is told by the action that made it: by this one, by another of the same micro batch, by the latest of its
class whatever its micro batch, or by none. When a tensor is given up with which the schedule goes on is seen as it
happens.
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

from legoai.cost.pipelines.classes import FIRST, Action, Class, Classes, first_micro_batches
from legoai.cost.pipelines.gradients import Gradients
from legoai.cost.pipelines.patterns import (
    STORAGE,
    Alone,
    Entry,
    Gradient,
    Own,
    Pattern,
    Place,
    Result,
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
from legoai.runtime.torch_internals.units import freed_after_forward

FEWEST: Final = 5
"""Micro batches of a pass below which nothing is left out."""


@dataclass(slots=True)
class Repeats:
    """The actions of a rank that were run, and those that need not be.

    Args:
        recorder: of the rank.
        micro_batches: of a pass.
        freed: whether parameters are taken to be freed after each forward, so that there are more classes of actions.
    """

    recorder: Capture
    micro_batches: int
    freed: bool = False
    orders: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """The micro batches of each kind of action of each stage, in the order of a pass."""
    compared: dict[int, set[int]] = field(default_factory=dict)
    """Of each stage, the micro batches with which classes of actions begin and end in a pass."""
    classes: Classes = field(default_factory=lambda: Classes({}, False))
    step: int = 0
    passes: int = 0
    patterns: dict[tuple[int, str, Class], Pattern] = field(default_factory=dict)
    made: dict[Action, Instance] = field(default_factory=dict)
    """What each action of this pass made."""
    maker: dict[tuple[int, int], tuple[Action, int]] = field(default_factory=dict)
    """The action that made a number of a kind, and its slot there, of those that were run."""
    written: list[tuple[int, Action]] = field(default_factory=list)
    """The first storage of each action that was not run, ascending."""
    latest: dict[tuple[int, str, str], int] = field(default_factory=dict)
    """The micro batch of the latest action of each line."""
    staying: set[tuple[int, int]] = field(default_factory=set)
    """Kind and number of what patterns name by itself though an action made it."""
    tied: set[int] = field(default_factory=set)
    """Storages of tensors with which the schedule goes on; their end is seen as it happens."""
    outputs: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """The storages of what the forward of a stage returned for a micro batch."""
    firsts: dict[tuple[int, int, int, str], Pattern] = field(default_factory=dict)
    """What the first action of each kind of each stage did in each pass, by step, pass, stage and kind."""
    alone: dict[tuple[int, int, int, str], list[Alone]] = field(default_factory=dict)
    """What was done for no micro batch in particular, by step, pass, stage and name."""
    apart: dict[Action, tuple[int, ...]] = field(default_factory=dict)
    """Of actions that leave gradients to other micro batches, their storages among those that it makes: ascending."""
    tensors: Tensors = field(init=False)
    gradients: Gradients = field(init=False)
    replays: bool = False
    """Whether nothing is run any more, but all of it is written as it was recorded."""
    gathered: set[int] = field(default_factory=set)
    """Stages whose parameters were gathered as before, and for which nobody has waited yet."""
    replayed: Counter[tuple[int, int, int, str]] = field(default_factory=Counter)
    numbers: dict[tuple[int, int, Action], Own] = field(default_factory=dict)
    """Of actions that are to be written, by step and pass: the numbers of what they make, where these are known."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """What the instances among the records stand for, by their identity."""

    def __post_init__(self) -> None:
        self.tensors = Tensors(self.recorder)
        self.gradients = Gradients(self.tensors)

    def begin_pass(self) -> None:
        """Note that a pass begins.

        Raises:
            UnequalError: what a pattern names by itself is no longer there.
        """
        living = {(STORAGE, item.number) for item in self.recorder.storages.values()} if self.staying else set()
        if not self.staying <= living:
            raise UnequalError("an action goes on with what another one left, which is gone in the next pass")
        self.clear(self.recorder.step, self.passes + 1 if self.step == self.recorder.step else 0)

    def clear(self, step: int, passes: int) -> None:
        """Forget what was done in the pass before a pass of a step."""
        self.step, self.passes = step, passes
        self.made.clear()
        self.apart.clear()
        self.maker.clear()
        self.written.clear()
        self.latest.clear()
        self.classes = Classes(self.classes.firsts, self.freed, self.classes.summed)
        self.outputs.clear()
        self.replayed.clear()

    def follow(self, actions: Iterable[Action]) -> None:
        """Hear of all actions of a pass that compute, in their order."""
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

    def runs(self, stage: int, micro_batch: int) -> bool:
        """Whether the actions of a micro batch of this pass are run."""
        if self.replays:
            return False
        if self.micro_batches < FEWEST:
            return True
        if self.step == 1 and not self.passes and micro_batch in self.compared[stage]:
            return True
        return any(other == stage and micro_batch == order[0] for (other, _), order in self.orders.items())

    def gather_or_free(self, stage: int, model: nn.Module) -> None:
        """Let the parameters of a stage be there, or not, as they are if all actions before the next one are run.

        Raises:
            UnequalError: some of them are kept in larger shards.
        """
        if not self.freed or self.micro_batches < FEWEST or not any(of == stage for of, *_ in self.made):
            return
        units = freed_after_forward(model)
        if units is None:
            raise UnequalError("parameters are kept on fewer ranks after forward")
        records = self.recorder.records
        start, before, self.recorder.paused = len(records), self.recorder.paused, True
        try:
            for unit in units:
                unit.unshard() if self.classes.holds(stage) else unit.reshard()
        finally:
            self.recorder.paused = before
            del records[start:]

    def ran(self, action: Action, start: int, results: Iterable[Any], on_buffers: tuple[bool, ...] = ()) -> None:
        """Take what an action did, which was run: keep it as the pattern, or compare it.

        Args:
            action: which.
            start: index of its first record.
            results: tensors with which the schedule goes on.
            on_buffers: of a backward, which of them are gradients of buffers.
        """
        if self.micro_batches < FEWEST:
            return
        instance, operands = self._compacted(start)
        described = tuple(self.tensors.described(item, instance) for item in results)
        left = self.gradients.left(action[0], instance) if self.classes.leaves_gradients(action) else ()
        self.entries[id(instance)] = Entry(instance, action, described, on_buffers, operands=operands)
        apart = tuple(sorted(item.place for item in left if isinstance(item, Result)))
        self.take(action, instance, described, on_buffers, left=left, apart=apart)

    def take(
        self,
        action: Action,
        instance: Instance,
        described: tuple[Result | None, ...],
        on_buffers: tuple[bool, ...],
        *,
        left: tuple[Gradient, ...] = (),
        apart: tuple[int, ...] = (),
    ) -> None:
        """Take what an action did: keep it as the pattern, or compare it."""
        stage, kind, micro_batch = action
        found = self.classes.enter(action)
        self.made[action] = instance
        outside = tuple(self._place(of, number, micro_batch) for of, number in outside_of(instance))
        self._made(action, instance, apart)
        self.tied |= storages_of(described, instance.own)
        pattern = Pattern(instance, outside, described, on_buffers, found, left, apart)
        if kind == "F":
            self.outputs[stage, micro_batch] = storages_of(described, instance.own)
        pattern.gives_up = first_end(instance, self.outputs.get((stage, micro_batch), set()))
        self.latest[self._line(action)] = micro_batch
        if micro_batch == self._first(stage, kind):
            self.firsts[self.step, self.passes, stage, kind] = pattern
            return
        known = self.patterns.get((stage, kind, found))
        if known is None:
            self.patterns[stage, kind, found] = pattern
        elif not known.equals(pattern, self.tied):
            raise UnequalError(f"action {stage}{kind}{micro_batch} is unlike those before it")

    def pass_over(
        self,
        action: Action,
        instance: Instance | None,
        described: tuple[Result | None, ...],
        apart: tuple[int, ...] = (),
    ) -> None:
        """Go on behind an action that was written; what it made is told where it is given."""
        self.classes.enter(action)
        self.latest[self._line(action)] = action[2]
        if instance is not None:
            self._made(action, instance, apart)
            self.tied |= storages_of(described, instance.own)

    def _made(self, action: Action, instance: Instance, apart: tuple[int, ...]) -> None:
        self.apart[action] = apart
        for of, numbers in enumerate(instance.own):
            self.maker.update({(of, number): (action, place * 3 + of) for place, number in enumerate(numbers)})

    def _line(self, action: Action) -> tuple[int, str, str]:
        """Actions of which the latest may have made what the next one names: a kind, or its class by itself."""
        stage, kind, micro_batch = action
        if not self.freed and (kind == "F" or stage not in self.classes.summed):
            return stage, kind, ""
        return stage, kind, self.classes.found[stage, "F" if kind == "L" else kind, micro_batch][0]

    def _first(self, stage: int, kind: str) -> int:
        """The micro batch with which the actions of a kind begin in each pass."""
        return self.orders[stage, "F" if kind == "L" else kind][0]

    def by_itself(self, stage: int, name: str, run: Callable[[], object]) -> None:
        """Run what a pass does for no micro batch in particular, or record it as it was recorded before."""
        if self.replays:
            self.again(stage, name)
            return
        start = len(self.recorder.records)
        if name == "REDUCE_GRAD":
            self.gradients.put_back(stage)
        run()
        self.keep(stage, name, start)

    def keep(self, stage: int, name: str, start: int) -> None:
        """Keep what was recorded from an index on, for no micro batch in particular."""
        if self.micro_batches >= FEWEST:
            instance, operands = self._compacted(start)
            self.entries[id(instance)] = Entry(instance, None, name=(stage, name), operands=operands)
            self.take_alone(stage, name, instance)
            if name == "REDUCE_GRAD" and stage in self.classes.summed:
                self.gradients.left(stage, instance)
                if self.gradients.are_there(stage):
                    raise UnequalError("gradients are left behind a pass")

    def take_alone(self, stage: int, name: str, instance: Instance) -> None:
        """Take what was done for no micro batch in particular."""
        alone = Alone(instance)
        if name == "REDUCE_GRAD" and stage in self.classes.summed:
            outside = tuple(self._place(of, number, NONE) for of, number in outside_of(instance))
            alone = Alone(instance, outside, self.classes.waiting(stage))
        self.alone.setdefault((self.step, self.passes, stage, name), []).append(alone)

    def _compacted(self, start: int) -> tuple[Instance, dict[int, Operands]]:
        """Put an instance in the place of what was recorded from an index on; return it, and what its kernels used."""
        records, operands = self.recorder.records, self.recorder.operands
        instance = first_instance(list(records_of(records[start:])))
        used = {}
        if operands is not None:
            if any(isinstance(item, Instance) for item in records[start:]):
                raise UnequalError("an action among the records of another")
            behind = list(itertools.takewhile(lambda index: index >= start, reversed(operands)))
            used = {index - start: operands.pop(index) for index in behind}
        records[start:] = [instance]
        return instance, used

    def again(self, stage: int, name: str) -> None:
        """Record what was kept of the same place in a pass like this one."""
        key = self.step, self.passes, stage, name
        place, known = self.replayed[key], self.alone.get(key, [])
        if place == len(known):
            raise UnequalError(f"{name} of stage {stage} comes more often than it was recorded")
        self.replayed[key] += 1
        alone = known[place]
        instance = alone.instance
        if alone.outside is not None:
            instance = replace(instance, outside=tuple(self._number((stage, "", NONE), it) for it in alone.outside))
        self.recorder.records.append(instance)

    def _place(self, kind: int, number: int, micro_batch: int) -> Place:
        """Tell a number that an action names and does not make."""
        found = self.maker.get((kind, number)) or self._writer(kind, number)
        if found is not None:
            (stage, name, other), slot = found
            if other == micro_batch:
                before = bisect.bisect_left(self.apart.get(found[0], ()), slot // 3) if kind == STORAGE else 0
                return "other", (stage, name), slot - 3 * before
            latest = self._line(found[0])
            # What the first makes and others use may stay from pass to pass, as storages of gathered parameters do.
            stays = self.freed and latest[-1] == FIRST and kind == STORAGE
            if other == self.latest.get(latest) and not stays:
                return "latest", latest, slot
            self.staying.add((kind, number))
            return "made", found[0], number
        return "fixed", None, number

    def _writer(self, kind: int, number: int) -> tuple[Action, int] | None:
        """Return the action that was not run and that makes a number, and its slot there."""
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

    def write(self, action: Action, give_up: Callable[[], object]) -> list[torch.Tensor | None]:
        """Record an action that is not run, and return the tensors with which the schedule goes on.

        Args:
            action: which.
            give_up: lets go of the outputs of the stage, where the action does so.
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
                self.gradients.wrote(stage, pattern.gradients, own)
        self.recorder.records.append(instances[0])
        if pattern.gives_up >= 0:
            give_up()
            self.recorder.records.append(instances[1])
        self.made[action], self.apart[action] = instances[0], pattern.apart
        if kind == "F":
            self.outputs[stage, micro_batch] = storages_of(pattern.results, own)
        self.latest[self._line(action)] = micro_batch
        return [None if item is None else self.tensor(item, own) for item in pattern.results]

    def _pattern(self, action: Action, of_class: Class) -> Pattern:
        """What an action of a class does that is not run."""
        stage, kind, micro_batch = action
        if self.replays and micro_batch == self._first(stage, kind):
            found = self.firsts.get((self.step, self.passes, stage, kind))
            other = not self.numbers  # than the rank that was captured, whose actions may have another order
            if found is not None and other and any(of in ("latest", "made") for of, *_ in found.outside):
                raise UnequalError(f"the first {kind} of stage {stage} goes on with what another action left")
        else:
            found = self.patterns.get((stage, kind, of_class))
        if found is None:
            raise UnequalError(f"{kind} of stage {stage} has no pattern yet")
        return found

    def know(self, actions: Sequence[Action]) -> bool:
        """Whether all actions of a pass in another order find such gradients as actions of this rank found."""
        summed = self.classes.summed
        classes = Classes(first_micro_batches(actions), self.freed, summed)
        found = {(*action[:2], classes.enter(action)) for action in actions if action[0] in summed}
        known = {(*key[2:], pattern.of_class) for key, pattern in self.firsts.items()} | self.patterns.keys()
        return found <= known and all(
            alone.waiting == classes.waiting(stage)
            for (*_, stage, name), several in self.alone.items()
            if name == "REDUCE_GRAD" and stage in summed
            for alone in several
        )

    def on_buffers(self, action: Action) -> tuple[bool, ...]:
        """For each input of a backward that is not run, whether its gradient is that of the buffer."""
        return self._pattern(action, self.classes.found[action]).on_buffers

    def _number(self, action: Action, place: Place) -> int:
        of, other, slot = place
        if of in ("made", "fixed"):
            return slot
        assert isinstance(other, tuple)
        micro_batch = action[2] if of == "other" else self.latest.get(other)
        made = None if micro_batch is None else self.made.get((*other[:2], micro_batch))
        if made is None:
            raise UnequalError(f"{other[1]} of stage {other[0]} comes later than for other micro batches")
        if of == "other" and slot % 3 == STORAGE:
            for left in self.apart.get((*other[:2], action[2]), ()):
                slot += 3 * (left <= slot // 3)
        if slot // 3 >= len(made.own[slot % 3]):
            raise UnequalError(f"{other[1]} of stage {other[0]} makes less than the first one made")
        return made.number(slot)

    def _own(self, action: Action, instance: Instance) -> Own:
        """Return numbers for what an action makes that is not run: those that it has, where others name them."""
        found = self.numbers.get((self.step, self.passes, action))
        if found is None:
            return self._reserved(instance)
        if list(map(len, found)) != list(map(len, instance.own)):
            raise UnequalError("an action makes less than others of its class")
        return found

    def _reserved(self, instance: Instance) -> tuple[range, range, range]:
        """Set numbers aside for what an action makes that is not run."""
        recorder = self.recorder
        storages, works, events = (len(numbers) for numbers in instance.own)
        storage, work = recorder.storage_count, recorder.work_count
        recorder.storage_count += storages
        recorder.work_count += works
        event = min([backend.next_event() for _ in range(events)], default=0)
        return range(storage, storage + storages), range(work, work + works), range(event, event + events)

    def tensor(self, item: Result, own: Sequence[Sequence[int]]) -> torch.Tensor:
        """A tensor of which nothing was computed, on the storage that the records name."""
        self.tied.add(own[STORAGE][item.place])
        return self.tensors.made(item, own)
