"""Traces of the other pipeline ranks that have stages equal to those of the captured rank.

They set up the same, gather the same and update the same, under other names; only the order in which micro batches pass
their stages is another. So the schedule is run once more for each of them, by torch as before, in the order of that
rank, but with nothing computed: every action is written as it was recorded, and what is sent, received, waited for and
given up is seen as it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch.distributed.pipelining.schedules import RESHARD, UNSHARD

from legoai.cost.memory.effects import MemoryEffects
from legoai.cost.pipelines.order import computing
from legoai.cost.pipelines.patterns import OrderError, UnequalError
from legoai.cost.pipelines.stages import Heard
from legoai.cost.trace.records import Allocate, Free
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.translation import Translation
from legoai.runtime.pipeline import Pipeline
from legoai.runtime.torch_internals.pipelining import Action, PipelineScheduleRuntime

OtherItems: TypeAlias = tuple[tuple[Item, ...], Translation]
"""Items of another rank's trace, and the translation of the names in their segments."""

_CHANGED: Final = ("pipeline_order_with_comms", "_comp_type_to_function_map")
"""What a schedule has otherwise while it is run for another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A rank that is like the one that was captured.

    Attributes:
        coordinate: on the `pp` axis.
        stages: that it has, ascending.
        translation: from the names of the one that was captured to its own.
    """

    coordinate: int
    stages: tuple[int, ...]
    translation: Translation


def others_of(pipeline: Pipeline, coordinate: int, others: Sequence[int], *, stride: int) -> list[Other]:
    """Return ranks that are like one.

    Args:
        pipeline: of the program.
        coordinate: of the one on the `pp` axis.
        others: coordinates of ranks whose stages are equal to its own, in their order.
        stride: ranks of a coordinate.
    """
    found = []
    mine = sorted(pipeline.stages_of_rank[coordinate])
    for other in others:
        theirs = sorted(pipeline.stages_of_rank[other])
        modules = {
            own: path
            for stage, like in zip(mine, theirs, strict=True)
            for own, path in zip(pipeline.stages[stage], pipeline.stages[like], strict=True)
        }
        here = range(coordinate * stride, (coordinate + 1) * stride)
        translation = Translation(modules, dict(zip(mine, theirs, strict=True)), here, (other - coordinate) * stride)
        found.append(Other(coordinate=other, stages=tuple(theirs), translation=translation))
    return found


def items_of_others(heard: Heard, others: Sequence[Other]) -> Iterator[OtherItems]:
    """Yield the items of the traces of other ranks of a pipeline; their segments keep the names of this one.

    Args:
        heard: of the rank that was captured, which has taken its steps, each of as many passes.
        others: the ranks.

    Raises:
        UnequalError: it cannot be said what the next of them does: it gathers a stage more often, for example.
    """
    recorder, passes = heard.recorder, list(heard.passes)
    if len(passes) % recorder.step:
        raise UnequalError("steps of different numbers of passes")
    steps, own = recorder.step, recorder.records
    each = len(passes) // steps
    begins, ends = [passes[0].prepared, *(item.begin for item in passes[1:])], [item.end for item in passes]
    between = [own[end:begin] for end, begin in zip([0, *ends], [*begins, len(own)], strict=True)]
    heard.repeats.replays = True
    try:
        for other in others:
            items = list(between[0])
            for index, behind in enumerate(between[1:]):
                items += _pass(heard, other, step=index // each + 1, first=not index)
                items += behind
            _check(items)
            rename = other.translation.record
            translated = tuple(item if isinstance(item, Instance) else rename(item) for item in items)
            yield translated, other.translation
    finally:
        recorder.records, recorder.step = own, steps
        heard.passes[:] = passes
        heard.repeats.replays = False


def _pass(heard: Heard, other: Other, *, step: int, first: bool) -> list[Item]:
    """Run the schedule in the order of another rank; return what it does, the first time but for preparing stages."""
    recorder, schedule = heard.recorder, heard.schedule
    recorder.records = []
    recorder.step = step
    like = {theirs: mine for mine, theirs in other.translation.stages.items()}
    before = {
        name: getattr(schedule, name, None) for name in ("pipeline_order_with_comms", "_comp_type_to_function_map")
    }
    stage = heard.stages[0]
    index = stage.stage_index
    try:
        if isinstance(schedule, PipelineScheduleRuntime):
            order, own = schedule.pipeline_order_with_comms[other.coordinate], schedule.pipeline_order_with_comms
            order = [_translated(action, like) for action in order]
            schedule.pipeline_order_with_comms = {schedule.rank: order}
            schedule._comp_type_to_function_map = {UNSHARD: _gather(heard), RESHARD: _free(heard)}
            _check_order(heard, own[schedule.rank])
        else:
            stage.stage_index = other.stages[0]  # by which torch's 1F1B knows how many forwards come first
        losses: list[Any] = []  # which end behind the pass
        schedule.step(target=None, losses=losses, return_outputs=False)
    finally:
        stage.stage_index = index
        for name, value in before.items():
            if value is not None:
                setattr(schedule, name, value)
    done = heard.passes[-1]
    return recorder.records[done.prepared if first else done.begin : done.end]


def _translated(action: Action, like: dict[int, int]) -> Action:
    """Return an action of another rank's stage as that of the stage of this rank that is like it.

    Two that are taken together are of no stage.
    """
    return action._replace(
        stage_index=like.get(action.stage_index, action.stage_index),
        sub_actions=action.sub_actions and tuple(_translated(part, like) for part in action.sub_actions),
    )


def _transfers(order: Iterable[Action]) -> Counter[tuple[int, str]]:
    """Count the sends and receives of each stage; two stages of one rank hand on without them."""
    kinds = ((action.stage_index, action.computation_type.value) for action in order)
    return Counter((stage, kind) for stage, kind in kinds if kind.startswith(("SEND", "RECV")))


def _check_order(heard: Heard, own: Sequence[Action]) -> None:
    """Check that each kind of action begins with the same micro batch, and comes as often.

    Args:
        heard: of the rank that was captured, with the order of another one.
        own: the order of the one that was captured.

    Raises:
        OrderError: an action of the other rank does what none of this one does.
    """
    if _transfers(own) != _transfers(heard.schedule.pipeline_order_with_comms[heard.schedule.rank]):
        raise OrderError("another rank sends and receives otherwise")
    orders: dict[tuple[int, str], list[int]] = {}
    listed = list(computing(heard.schedule))
    for stage, kind, micro_batch in listed:
        orders.setdefault((stage, kind), []).append(micro_batch)
    known = heard.repeats.orders
    if orders.keys() != known.keys() or any(
        order[0] != known[key][0] or Counter(order) != Counter(known[key]) for key, order in orders.items()
    ):
        raise OrderError("the actions of another rank are others")
    if not heard.repeats.know(listed):
        raise OrderError("the gradients that actions of another rank find are others")


def _gather(heard: Heard) -> Any:
    repeats = heard.repeats

    def gather(action: Action, _: Any) -> None:
        repeats.again(action.stage_index, "UNSHARD")
        if repeats.alone.get((repeats.step, repeats.passes, action.stage_index, "wait")):
            repeats.gathered.add(action.stage_index)

    return gather


def _free(heard: Heard) -> Any:
    def free(action: Action, _: Any) -> None:
        heard.repeats.again(action.stage_index, "RESHARD")

    return free


def _check(items: Sequence[Item]) -> None:
    """Check that what is seen to end was made, and ends only once."""
    made: set[int] = set()
    for item in items:
        if isinstance(item, Instance):
            made.update(item.own[0])
            if not made.issuperset(item.segment.summary(MemoryEffects).changed.numbers(item)):
                raise UnequalError("something changes or ends that was not made")
        elif isinstance(item, Allocate):
            made.add(item.storage)
        elif isinstance(item, Free):
            if item.storage not in made:
                raise UnequalError("something ends that was not made")
            made.remove(item.storage)
