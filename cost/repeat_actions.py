"""Which actions of a pipeline are equal, and how are they recorded without being run?

The schedule runs whole, with every send, receive and wait; only what a stage computes is left out where it was
computed before. Of each kind of action of each stage the first two and the last of the first step are run, and the
first and the last of the second step, with all that is done to their micro batches. The second is the pattern: in place
of those that are not run its records are written, with numbers of their own, and the tensors that the schedule goes on
with, such as what is sent, stand there without anything having been computed. All others that are run must come out
equal to the pattern: the last of the first step, which comes behind two others, and that of the second step, which
comes behind one as the pattern does. Else, as where gradients of weights that one action leaves are added up by the
next, :class:`UnequalError` is raised and the pipeline is to be captured whole.

A storage is told by the action that made it: by this one, by another of the same micro batch, by the latest of its kind
whatever its micro batch, or by none. When a tensor is given up with which the schedule goes on is seen as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from legoai.cost.device import SIM, backend
from legoai.cost.recorder import Capture
from legoai.cost.tape import KINDS, MAKES, NONE, Tape, alike, encoded, renamed
from legoai.cost.trace import Free, Record

Action: TypeAlias = tuple[int, str, int]
"""Stage, kind and micro batch. `L` is the loss, which is recorded as a part of the last stage's `F`."""

Place: TypeAlias = tuple[Literal["own", "other", "latest", "fixed"], object, int]
"""How a number is told: by whose making, by which action, and as which of the numbers that it made."""

_FEWEST: Final = 5
"""Micro batches of a pass below which nothing is left out."""


class UnequalError(BaseException):
    """Actions are not equal, or cannot be seen to be.

    Not an ordinary exception: torch's schedules log those, with all of their actions, before they raise them again.
    """


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor with which the schedule goes on.

    Attributes:
        shape: of the local tensor.
        stride: of it.
        dtype: of it.
        spec: of the DTensor whose local tensor it is; None for a plain tensor.
        place: of its storage among what the action made.
        work: of the collective whose result it is and for which nobody has waited yet; None for none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: DTensorSpec | None
    place: int
    work: int | None


@dataclass(slots=True)
class _Pattern:
    """What an action was seen to do."""

    tape: Tape
    places: list[Place | None]
    made: int
    results: tuple[_Tensor | None, ...]
    touched: dict[int, Place] = field(default_factory=dict)
    """How the storages that its kernels touch are told, where somebody asks what they touch."""
    on_buffers: tuple[bool, ...] = ()
    """Of a backward, for each input: whether its gradient is that of the buffer in which it was received."""
    gives_up: int = -1
    """The record at which the outputs of the stage are given up; -1 where they are not."""


@dataclass(slots=True)
class Repeats:
    """The actions of a rank that were run, and those that need not be.

    Args:
        recorder: of the rank.
        micro_batches: of a pass.
    """

    recorder: Capture
    micro_batches: int
    orders: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """The micro batches of each kind of action of each stage, in the order of a pass."""
    step: int = 0
    passes: int = 0
    patterns: dict[tuple[int, str], _Pattern] = field(default_factory=dict)
    made: dict[Action, list[int]] = field(default_factory=dict)
    """The numbers that each action of this pass made, as a tape encodes them."""
    maker: dict[int, tuple[Action, int]] = field(default_factory=dict)
    latest: dict[tuple[int, str], int] = field(default_factory=dict)
    """The micro batch of the latest action of each kind."""
    tied: set[int] = field(default_factory=set)
    """Storages of tensors with which the schedule goes on; their end is seen as it happens."""

    def begin_pass(self) -> None:
        """Note that a pass begins."""
        self.passes = self.passes + 1 if self.step == self.recorder.step else 0
        self.step = self.recorder.step
        self.made.clear()
        self.maker.clear()
        self.latest.clear()

    def follow(self, actions: Iterable[Action]) -> None:
        """Hear of all actions of a pass that compute, in their order."""
        for stage, kind, micro_batch in actions:
            self.orders.setdefault((stage, kind), []).append(micro_batch)

    def runs(self, stage: int, micro_batch: int) -> bool:
        """Whether the actions of a micro batch of this pass are run."""
        if self.micro_batches < _FEWEST:
            return True
        for (other, _), order in self.orders.items():
            compared = (order[min(1, len(order) - 1)], order[-1])[self.step > 1 :]
            if other == stage and (micro_batch == order[0] or (micro_batch in compared and not self.passes)):
                return True
        return False

    def ran(self, action: Action, start: int, results: Iterable[Any], on_buffers: tuple[bool, ...] = ()) -> None:
        """Take what an action did, which was run: keep it as the pattern, or compare it.

        Args:
            action: which.
            start: index of its first record.
            results: tensors with which the schedule goes on.
            on_buffers: of a backward, which of them are gradients of buffers.
        """
        if self.micro_batches < _FEWEST:
            return
        stage, kind, micro_batch = action
        touches = self.recorder.touches or {}
        count = len(self.recorder.records)
        tape = Tape.of(self.recorder.records[start:], [touches.get(index) for index in range(start, count)])
        made = tape.made(0, len(tape))
        self.made[action] = list(made)
        self.maker.update({number: (action, place) for number, place in made.items()})
        tensors = tuple(self._described(item, made) for item in results)
        places = [None if number == NONE else self._place(number, micro_batch, made) for number in tape.numbers]
        pattern = _Pattern(tape, places, len(made), tensors, on_buffers=on_buffers)
        self.latest[stage, kind] = micro_batch
        if micro_batch == self.orders[stage, "F" if kind == "L" else kind][0]:
            return
        known = self.patterns.get((stage, kind))
        if known is None:
            pattern.touched = {
                number: self._place(number, micro_batch, made)
                for touch in tape.touches
                if touch is not None
                for number in (*touch.inputs, *touch.outputs)
                if number != NONE
            }
            outputs = self._outputs(action)
            for index, (record, number) in enumerate(zip(tape.records, tape.numbers, strict=True)):
                if isinstance(record, Free) and number in outputs:
                    pattern.gives_up = index
                    break
            self.patterns[stage, kind] = pattern
        elif not self._equal(known, pattern):
            raise UnequalError(f"action {stage}{kind}{micro_batch} is unlike those before it")

    def _outputs(self, action: Action) -> set[int]:
        """The storages of what the stage's forward of the micro batch returned."""
        stage, _, micro_batch = action
        pattern, made = self.patterns.get((stage, "F")), self.made.get((stage, "F", micro_batch), [])
        return {made[item.place] for item in pattern.results if item is not None} if pattern is not None else set()

    def _described(self, value: Any, made: dict[int, int]) -> _Tensor | None:
        if value is None:
            return None
        spec = value._spec if isinstance(value, DTensor) else None
        local = value._local_tensor if isinstance(value, DTensor) else value
        local = local.elem if isinstance(local, AsyncCollectiveTensor) else local
        number = self.recorder.number_of(local)
        key = None if number is None else encoded("storage", number)
        if key is None or key not in made:
            raise UnequalError("an action returns what it did not make")
        assert number is not None
        self.tied.add(key)
        work = self.recorder.pending.get(number)
        place = None if work is None else made.get(encoded("work", work))
        if work is not None and place is None:
            raise UnequalError("an action returns what another one gathers")
        return _Tensor(tuple(local.shape), local.stride(), local.dtype, spec, made[key], place)

    def _place(self, number: int, micro_batch: int, made: dict[int, int]) -> Place:
        if number in made:
            return "own", None, made[number]
        if number in self.maker:
            (stage, kind, other), place = self.maker[number]
            if other == micro_batch:
                return "other", (stage, kind), place
            if other == self.latest.get((stage, kind)):
                return "latest", (stage, kind), place
        return "fixed", None, number

    def _equal(self, known: _Pattern, other: _Pattern) -> bool:
        """Whether two are equal but for the end of tensors with which the schedule goes on."""
        mine, theirs = self._told(known), self._told(other)
        return (
            (known.made, known.results, known.on_buffers) == (other.made, other.results, other.on_buffers)
            and len(mine) == len(theirs)
            and all(one[1] == two[1] and (alike(one[0], two[0])) for one, two in zip(mine, theirs, strict=True))
        )

    def _told(self, pattern: _Pattern) -> list[tuple[Record, Place | None]]:
        return [
            (record, place)
            for record, number, place in zip(pattern.tape.records, pattern.tape.numbers, pattern.places, strict=True)
            if not (isinstance(record, Free) and number in self.tied)
        ]

    def write(self, action: Action, give_up: Callable[[], object]) -> list[torch.Tensor | None]:
        """Record an action that is not run, and return the tensors with which the schedule goes on.

        Args:
            action: which.
            give_up: lets go of the outputs of the stage, where the action does so.
        """
        stage, kind, _ = action
        pattern = self.patterns.get((stage, kind))
        if pattern is None:
            raise UnequalError(f"{kind} of stage {stage} has no pattern yet")
        recorder = self.recorder
        numbers: list[int] = [NONE] * pattern.made
        self.made[action] = numbers

        def name(number: int) -> int:
            return self._number(action, pattern.touched[number], number, numbers, False)

        for index, (record, number, place) in enumerate(
            zip(pattern.tape.records, pattern.tape.numbers, pattern.places, strict=True)
        ):
            touch = pattern.tape.touches[index]
            if touch is not None and recorder.touches is not None:
                recorder.touches[len(recorder.records)] = touch.renamed(name)
            if index == pattern.gives_up:
                give_up()
            if place is None:
                recorder.record(record)
                continue
            if isinstance(record, Free) and number in self.tied:
                continue
            new = self._number(action, place, number, numbers, isinstance(record, MAKES))
            recorder.record(renamed(record, new // len(KINDS)))
        self.maker.update({number: (action, place) for place, number in enumerate(numbers)})
        self.latest[stage, kind] = action[2]
        return [None if item is None else self._tensor(item, numbers) for item in pattern.results]

    def gives_up(self, stage: int, kind: str) -> bool:
        """Whether an action of this kind lets go of the stage's outputs while it runs."""
        pattern = self.patterns.get((stage, kind))
        return pattern is not None and pattern.gives_up >= 0

    def _number(self, action: Action, place: Place, number: int, numbers: list[int], makes: bool) -> int:
        of, other, index = place
        if of == "fixed":
            return number
        if of == "own":
            if makes and numbers[index] == NONE:
                numbers[index] = self._fresh(number % len(KINDS))
            return numbers[index]
        assert isinstance(other, tuple)
        micro_batch = action[2] if of == "other" else self.latest.get(other)
        made = None if micro_batch is None else self.made.get((*other, micro_batch))
        if made is None:
            raise UnequalError(f"{other[1]} of stage {other[0]} comes later than for other micro batches")
        return made[index]

    def _fresh(self, kind: int) -> int:
        recorder = self.recorder
        if KINDS[kind] == "storage":
            recorder.storage_count += 1
            return encoded("storage", recorder.storage_count - 1)
        if KINDS[kind] == "work":
            recorder.work_count += 1
            return encoded("work", recorder.work_count - 1)
        return encoded("event", backend.next_event())

    def _tensor(self, item: _Tensor, numbers: list[int]) -> torch.Tensor:
        """A tensor of which nothing was computed, on the storage that the records name."""
        recorder = self.recorder
        before, recorder.paused = recorder.paused, True
        try:
            tensor = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device=SIM)
        finally:
            recorder.paused = before
        number = numbers[item.place]
        recorder.adopt(tensor, number // len(KINDS))
        self.tied.add(number)
        if item.work is not None:
            recorder.pending[number // len(KINDS)] = numbers[item.work] // len(KINDS)
            tensor = AsyncCollectiveTensor(tensor)
        return tensor if item.spec is None else DTensor(tensor, item.spec, requires_grad=False)  # type: ignore[no-untyped-call]
