"""Traces of pipeline ranks whose stages equal those of the captured rank.

Such ranks issue the same ops under other module names; only the order in which micro batches pass their stages differs.
So torch runs the schedule once more for each of them, in the order of that rank, with every action replayed rather than
executed. Sends, receives, waits and the release of tensors are recorded as the schedule issues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch.distributed.pipelining.schedules import RESHARD, UNSHARD

from legoai.cost.memory.effects import MemoryEffects
from legoai.cost.pipelines.order import compute_actions
from legoai.cost.pipelines.patterns import OrderError, UnequalError
from legoai.cost.pipelines.stages import PipelineHooks
from legoai.cost.trace.records import Allocate, Free
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.translation import Translation
from legoai.runtime.parallelism.pipeline import Pipeline
from legoai.runtime.torch_internals.distributed.pipelining import Action, PipelineScheduleRuntime

EqualRankItems: TypeAlias = tuple[tuple[Item, ...], Translation]
"""Items of another rank's trace, and the translation of the names in their segments."""

_CHANGED: Final = ("pipeline_order_with_comms", "_comp_type_to_function_map")
"""Attributes of a schedule that are replaced while it runs for another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualRank:
    """A rank whose stages equal those of the captured rank.

    Attributes:
        coordinate: on the `pp` axis.
        stages: its stages, ascending.
        translation: from the captured rank's names to its own.
    """

    coordinate: int
    stages: tuple[int, ...]
    translation: Translation


def equal_ranks(pipeline: Pipeline, coordinate: int, others: Sequence[int], *, stride: int) -> list[EqualRank]:
    """Return the ranks whose stages equal those of a captured rank.

    Args:
        pipeline: of the program.
        coordinate: of the captured rank on the `pp` axis.
        others: coordinates of the ranks with equal stages, in order.
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
        found.append(EqualRank(coordinate=other, stages=tuple(theirs), translation=translation))
    return found


def items_of_equal_ranks(hooks: PipelineHooks, others: Sequence[EqualRank]) -> Iterator[EqualRankItems]:
    """Yield the trace items of other pipeline ranks; their segments keep the names of the captured rank.

    Args:
        hooks: of the captured rank, which has taken its steps, each of as many passes.
        others: the ranks.

    Raises:
        UnequalError: the next rank's trace cannot be derived: it all-gathers a stage more often, for example.
    """
    recorder, passes = hooks.recorder, list(hooks.passes)
    if len(passes) % recorder.step:
        raise UnequalError("steps of different numbers of passes")
    steps, own = recorder.step, recorder.records
    each = len(passes) // steps
    begins, ends = [passes[0].prepared, *(item.begin for item in passes[1:])], [item.end for item in passes]
    between = [own[end:begin] for end, begin in zip([0, *ends], [*begins, len(own)], strict=True)]
    hooks.repeats.replays = True
    try:
        for other in others:
            items = list(between[0])
            for index, behind in enumerate(between[1:]):
                items += _pass(hooks, other, step=index // each + 1, first=not index)
                items += behind
            _check(items)
            rename = other.translation.record
            translated = tuple(item if isinstance(item, Instance) else rename(item) for item in items)
            yield translated, other.translation
    finally:
        recorder.records, recorder.step = own, steps
        hooks.passes[:] = passes
        hooks.repeats.replays = False


def _pass(hooks: PipelineHooks, other: EqualRank, *, step: int, first: bool) -> list[Item]:
    """Run one pass in the order of another rank; return its items, in the first pass without stage preparation."""
    recorder, schedule = hooks.recorder, hooks.schedule
    recorder.records = []
    recorder.step = step
    like = {theirs: mine for mine, theirs in other.translation.stages.items()}
    before = {name: getattr(schedule, name, None) for name in _CHANGED}
    stage = hooks.stages[0]
    index = stage.stage_index
    try:
        if isinstance(schedule, PipelineScheduleRuntime):
            order, own = schedule.pipeline_order_with_comms[other.coordinate], schedule.pipeline_order_with_comms
            order = [_translated(action, like) for action in order]
            schedule.pipeline_order_with_comms = {schedule.rank: order}
            schedule._comp_type_to_function_map = {UNSHARD: _gather(hooks), RESHARD: _free(hooks)}
            _check_order(hooks, own[schedule.rank])
        else:
            stage.stage_index = other.stages[0]  # torch's 1F1B derives the number of warm-up forwards from it
        losses: list[Any] = []  # keeps the losses alive until the pass ends
        schedule.step(target=None, losses=losses, return_outputs=False)
    finally:
        stage.stage_index = index
        for name, value in before.items():
            if value is not None:
                setattr(schedule, name, value)
    done = hooks.passes[-1]
    return recorder.records[done.prepared if first else done.begin : done.end]


def _translated(action: Action, like: dict[int, int]) -> Action:
    """Return an action of another rank's stage as the action of the equal stage of this rank.

    An action with sub-actions (overlapped F and B) has no stage itself.
    """
    return action._replace(
        stage_index=like.get(action.stage_index, action.stage_index),
        sub_actions=action.sub_actions and tuple(_translated(part, like) for part in action.sub_actions),
    )


def _transfers(order: Iterable[Action]) -> Counter[tuple[int, str]]:
    """Count the sends and receives of each stage; adjacent stages of one rank need none between them."""
    kinds = ((action.stage_index, action.computation_type.value) for action in order)
    return Counter((stage, kind) for stage, kind in kinds if kind.startswith(("SEND", "RECV")))


def _check_order(hooks: PipelineHooks, own: Sequence[Action]) -> None:
    """Check that each kind of action begins with the same micro batch on both ranks, and occurs as often.

    Args:
        hooks: of the captured rank, with the order of another rank.
        own: the order of the captured rank.

    Raises:
        OrderError: an action of the other rank has no counterpart on this one.
    """
    if _transfers(own) != _transfers(hooks.schedule.pipeline_order_with_comms[hooks.schedule.rank]):
        raise OrderError("another rank has other sends and receives")
    orders: dict[tuple[int, str], list[int]] = {}
    listed = list(compute_actions(hooks.schedule))
    for stage, kind, micro_batch in listed:
        orders.setdefault((stage, kind), []).append(micro_batch)
    known = hooks.repeats.orders
    if orders.keys() != known.keys() or any(
        order[0] != known[key][0] or Counter(order) != Counter(known[key]) for key, order in orders.items()
    ):
        raise OrderError("another rank has other actions")
    if not hooks.repeats.covers(listed):
        raise OrderError("other gradients wait before the actions of another rank")


def _gather(hooks: PipelineHooks) -> Any:
    repeats = hooks.repeats

    def gather(action: Action, _: Any) -> None:
        repeats.replay_stage_action(action.stage_index, "UNSHARD")
        if repeats.stage_actions.get((repeats.step, repeats.passes, action.stage_index, "wait")):
            repeats.gathered.add(action.stage_index)

    return gather


def _free(hooks: PipelineHooks) -> Any:
    def free(action: Action, _: Any) -> None:
        hooks.repeats.replay_stage_action(action.stage_index, "RESHARD")

    return free


def _check(items: Sequence[Item]) -> None:
    """Check that every storage that ends was allocated, and ends only once."""
    made: set[int] = set()
    for item in items:
        if isinstance(item, Instance):
            made.update(item.own[0])
            if not made.issuperset(item.segment.summary(MemoryEffects).changed.numbers(item)):
                raise UnequalError("a storage that was not allocated changes or ends")
        elif isinstance(item, Allocate):
            made.add(item.storage)
        elif isinstance(item, Free):
            if item.storage not in made:
                raise UnequalError("a storage that was not allocated ends")
            made.remove(item.storage)
