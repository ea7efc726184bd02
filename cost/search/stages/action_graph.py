"""Graph of a pipeline schedule's actions and its longest path.

A rank runs its actions one after another, in the order of torch's own schedule class or of the plan's file. A forward
waits for the forward of the previous stage, a backward for the backward of the next. The order does not depend on the
split of the model. So each path gives a lower bound of the step time of every split, linear in the stages' seconds.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from legoai.cost.search.stages.order_cache import Action, Listed, kept_or_listed
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import pass_micro_batches, passes
from legoai.dsl.analysis.stages.orders import COMPUTE, Order
from legoai.dsl.analysis.stages.pipeline import order, stage_count, stages_of_ranks
from legoai.specs.directives.pipeline import SINGLE_STAGE, OrderFile

_GATHERED: Final = 3
"""Stages that torch's schedule runtime keeps unsharded at once: `max_active_stages` of `_add_unshard_reshard`."""
_MOST_ACTIONS: Final = 100_000
"""Limit of the actions of a step; beyond it no graph is built, which would take more than a second."""


_Counts: TypeAlias = tuple[tuple[int, int], ...]


class Held(NamedTuple):
    """Memory state of a rank at a moment of a step.

    Attributes:
        micro_batches: micro batches in flight, between forward and backward, by stage.
        summed: stages with accumulated gradients: after the first and before the last backward of a pass.
        gathered: stages whose parameters are unsharded, if they stay so from forward to backward.
        halved: micro batches between the halves of a split backward, by stage; the second half reads the same
            activations as the first.
        sent: number of tensors that were sent to other ranks and are kept, since nothing has waited for them.
    """

    micro_batches: Mapping[int, int]
    summed: frozenset[int]
    gathered: frozenset[int]
    halved: Mapping[int, int]
    sent: int

    def kept(self, *, between_halves: bool) -> Mapping[int, int]:
        """Micro batches whose activations are kept, by stage; with or without those between the halves of backward."""
        return Counter(self.micro_batches) + Counter(self.halved) if between_halves else self.micro_batches

    @property
    def with_gradients(self) -> Mapping[int, int]:
        """Micro batches between the halves of backward, by stage; without stage 0, whose inputs have no gradient."""
        return {stage: count for stage, count in self.halved.items() if stage}


Seconds = Sequence[Mapping[str, float]]
"""Seconds of each stage's actions, by kind."""


@dataclass(frozen=True, slots=True)
class Path:
    """A path through the actions, as the number of its actions of each stage and kind."""

    counts: tuple[tuple[tuple[int, str], int], ...]

    def seconds(self, seconds: Seconds) -> float:
        """Length of the path."""
        return sum(count * seconds[stage][kind] for (stage, kind), count in self.counts)


class _Ordered(NamedTuple):
    """The actions of all ranks in topological order.

    Attributes:
        actions: all of them.
        before: of each, the places of its predecessors.
        last: place of the last action of each rank.
        works: stage and kind of the actions, each pair once.
        work: of each action, the place of its pair.
    """

    actions: list[Action]
    before: list[tuple[int, ...]]
    last: list[int]
    works: list[tuple[int, str]]
    work: list[int]


class ActionGraph:
    """The actions of all ranks in topological order, with their predecessors.

    Args:
        ranks: actions of each rank in a step, in its order.
        of_pass: micro batches of a pass, after which a stage's gradients are reduced.
        ahead: number of stages that are unsharded at once: those of the next actions.
        waits_at_end: whether what a rank sends is waited for at the end of a pass only.
    """

    def __init__(
        self, ranks: Sequence[Sequence[Action]], of_pass: int, ahead: int = 0, *, waits_at_end: bool = False
    ) -> None:
        self.stages = 1 + max(action.stage for actions in ranks for action in actions)
        last = self.stages - 1 if waits_at_end else None
        self.held = tuple(tuple(_most_held(actions, of_pass, ahead, last)) for actions in ranks)
        """For each rank, the memory states that no other state of the rank dominates."""
        self._ranks = ranks

    @property
    def actions(self) -> Sequence[Action]:
        """The actions of all ranks.

        Raises:
            ValueError: the ranks wait for each other in a cycle.
        """
        return self._ordered.actions

    @functools.cached_property
    def _ordered(self) -> _Ordered:
        """What the times of a step are found by; most candidates are excluded by their memory before."""
        ranks, stages = self._ranks, self.stages
        ordered: list[Action] = []
        before: list[tuple[int, ...]] = []
        places: dict[Action, int] = {}
        following = [0] * len(ranks)
        previous = [-1] * len(ranks)
        while any(place < len(actions) for place, actions in zip(following, ranks, strict=True)):
            known = len(ordered)
            for rank, actions in enumerate(ranks):
                while following[rank] < len(actions):
                    action = actions[following[rank]]
                    waits = _waits_for(action, stages)
                    found = [places[one] for one in waits if one in places]
                    if waits and not found:
                        break
                    places[action] = len(ordered)
                    ordered.append(action)
                    before.append(tuple({*found, *([previous[rank]] if previous[rank] >= 0 else [])}))
                    previous[rank] = places[action]
                    following[rank] += 1
            if len(ordered) == known:
                raise ValueError("the ranks wait for each other")
        works = sorted({(action.stage, action.kind) for action in ordered})
        places_of_works = {work: place for place, work in enumerate(works)}
        work = [places_of_works[action.stage, action.kind] for action in ordered]
        return _Ordered(ordered, before, [place for place in previous if place >= 0], works, work)

    def time(self, seconds: Seconds) -> float:
        """Step time, as the first result of :meth:`longest`."""
        graph = self._ordered
        took = [seconds[stage][kind] for stage, kind in graph.works]
        ends: list[float] = []
        for work, before in zip(graph.work, graph.before, strict=True):
            ends.append(took[work] + (max([ends[place] for place in before]) if before else 0.0))
        return max(ends[place] for place in graph.last)

    def longest(self, seconds: Seconds) -> tuple[float, tuple[Path, ...]]:
        """Step time, and the longest path to the end of each rank, in descending order of length."""
        graph = self._ordered
        ends: list[float] = []
        whence: list[int] = []
        took = [seconds[stage][kind] for stage, kind in graph.works]
        for work, before in zip(graph.work, graph.before, strict=True):
            last = max(before, key=ends.__getitem__, default=-1)
            whence.append(last)
            ends.append((ends[last] if last >= 0 else 0.0) + took[work])
        order = sorted(graph.last, key=lambda place: -ends[place])
        return ends[order[0]], tuple(self._path(place, whence) for place in order)

    def _path(self, place: int, whence: Sequence[int]) -> Path:
        counts: Counter[tuple[int, str]] = Counter()
        while place >= 0:
            action = self.actions[place]
            counts[action.stage, action.kind] += 1
            place = whence[place]
        return Path(tuple(sorted(counts.items())))


def _waits_for(action: Action, stages: int) -> list[Action]:
    """Actions of which one must have ended, besides the rank's previous action; empty for none."""
    stage, kind, micro_batch = action
    if kind == "F":
        return [Action(stage - 1, "F", micro_batch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", micro_batch)]
    if stage == stages - 1:
        return [Action(stage, "F", micro_batch)]
    return [Action(stage + 1, name, micro_batch) for name in ("B", "I")]


_CHANGES: Final = {"F": (0, 1), "B": (0, -1), "I": (1, -1), "W": (-1, 0)}
"""Changes by an action: of the micro batches between halves of backward, and of those between forward and backward."""


def _most_held(actions: Sequence[Action], of_pass: int, ahead: int, last: int | None) -> Iterator[Held]:
    """The memory states of a rank that no other state dominates.

    With a split backward, the states with the most micro batches between halves, and among these the most in flight,
    are added; states that differ in the micro batches between halves alone are listed once.
    """
    between: dict[_Counts, Held] = {}
    others: dict[tuple[_Counts, frozenset[int], frozenset[int]], Held] = {}
    for most_between, one in _moments(actions, of_pass, ahead, last):
        counts = tuple(sorted(one.micro_batches.items()))
        if most_between:
            between[counts] = _with_more_sent(between.get(counts), one)
        else:
            key = counts, one.summed, one.gathered
            others[key] = _with_more_sent(others.get(key), one)
    yield from between.values()
    for one in others.values():
        if not any(other is not one and _covers(other, one) for other in others.values()):
            yield one


def _with_more_sent(one: Held | None, other: Held) -> Held:
    return other if one is None or other.sent >= one.sent else one


def _moments(actions: Sequence[Action], of_pass: int, ahead: int, last: int | None) -> Iterator[tuple[bool, Held]]:
    """Yield states that may be the peak, each with whether the most micro batches are between halves of backward.

    `last` is the last stage of the pipeline, if what is sent is kept to the end of a pass.
    """
    now: defaultdict[int, int] = defaultdict(int)
    halved: defaultdict[int, int] = defaultdict(int)
    done: defaultdict[int, int] = defaultdict(int)
    gathered = _gathered(actions, of_pass, ahead)
    totals = list(itertools.accumulate((_CHANGES[action.kind] for action in actions), _added))
    fullest = max(totals, default=(0, 0))
    own, sent = {action.stage for action in actions}, 0
    is_sent = {
        (stage, kind): last is not None and _is_sent(stage, kind, own, last) for stage in own for kind in _CHANGES
    }
    pass_before = 0
    for place, ((stage, kind, micro_batch), following) in enumerate(zip(actions, [*actions[1:], None], strict=True)):
        between, before = _CHANGES[kind]
        halved[stage] += between
        now[stage] += before
        ends = kind in ("B", "W")
        done[stage] += ends
        if place and micro_batch // of_pass != pass_before:
            sent = 0
        pass_before = micro_batch // of_pass
        sent += is_sent[stage, kind]
        first = ends and done[stage] % of_pass == 1
        # After a forward that is followed by another forward, the next state has more micro batches in flight.
        most = kind == "F" and (following is None or following.kind != "F")
        most_between = totals[place] == fullest and fullest[0] > 0
        if first or most or most_between:
            summed = frozenset(stage for stage, count in done.items() if count % of_pass)
            apart = {stage: count for stage, count in halved.items() if count > 0}
            yield most_between, Held(dict(now), summed, gathered[place], apart, sent)


def _is_sent(stage: int, kind: str, own: Collection[int], last: int) -> bool:
    """Whether the result of an action is sent to another rank."""
    if kind == "W":
        return False
    to = stage + (1 if kind == "F" else -1)
    return 0 <= to <= last and to not in own


def _added(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _gathered(actions: Sequence[Action], of_pass: int, ahead: int) -> list[frozenset[int]]:
    """For each action, the next stages, from the action's own to those of later actions of its pass."""
    found: list[frozenset[int]] = []
    stages, of = list[int](), -1
    for stage, _, micro_batch in reversed(actions):
        if micro_batch // of_pass != of:
            stages, of = [], micro_batch // of_pass
        if stage not in stages[:1]:
            stages = [stage, *(one for one in stages if one != stage)][:ahead]
        found.append(frozenset(stages))
    return found[::-1]


def _covers(other: Held, one: Held) -> bool:
    counts = other.micro_batches
    more = all(counts.get(stage, 0) >= n for stage, n in one.micro_batches.items())
    return more and one.summed <= other.summed and one.gathered <= other.gathered and one.sent <= other.sent


def graph_of(analysis: Analysis) -> ActionGraph | None:
    """The action graph of a plan whose schedule and batch are decided; None without a pipeline, or for a large graph.

    Raises:
        Undecided: the schedule, the batch or the mesh is a hole.
    """
    pipeline, count = analysis.plan.pipeline, stage_count(analysis)
    each, often = pass_micro_batches(analysis.plan), passes(analysis.plan)
    if pipeline is None or count is None or each is None or often is None:
        return None
    if 3 * count * each * often > _MOST_ACTIONS:
        return None
    if isinstance(pipeline.schedule, OrderFile):
        found = order(analysis)
        if not isinstance(found, Order):
            return None
        listed = tuple(
            tuple(Action(item.stage, item.kind, item.micro_batch or 0) for cell in cells for item in cell
                  if item.kind in COMPUTE)
            for cells in found.ranks
        )  # fmt: skip
        return _graph(listed, each, often)
    held = stages_of_ranks(analysis)
    return _scheduled(pipeline.schedule, held, each, often) if held else None


@functools.lru_cache(maxsize=64)
def _scheduled(name: str, held: tuple[tuple[int, ...], ...], micro_batches: int, often: int) -> ActionGraph:
    if name in SINGLE_STAGE:
        return _graph(
            tuple(_single(name, len(held), rank, micro_batches) for rank in range(len(held))), micro_batches, often, 1
        )
    listed = kept_or_listed(name, held, micro_batches, functools.partial(_listed, name, held, micro_batches))
    return _graph(listed, micro_batches, often, _GATHERED, waits_at_end=True)


def _listed(name: str, held: tuple[tuple[int, ...], ...], micro_batches: int) -> Listed:
    """Actions of each rank under one of torch's schedules, in a pass."""
    from legoai.runtime.torch_internals.distributed.pipelining import computing_schedule

    count = sum(map(len, held))
    stages = [
        SimpleNamespace(
            num_stages=count, group_size=len(held), group_rank=0, stage_index=index, is_first=index == 0,
            is_last=index == count - 1, submod=None,
        )
        for index in held[0]
    ]  # fmt: skip
    made = computing_schedule(name)(stages, n_microbatches=micro_batches, loss_fn=lambda *_: None)
    return tuple(tuple(_computed(made.pipeline_order[rank])) for rank in range(len(held)))


def _single(name: str, ranks: int, rank: int, micro_batches: int) -> tuple[Action, ...]:
    """Actions of a rank with one stage under GPipe or 1F1B; torch's own list for 1F1B miscounts on the last rank."""
    forward, backward = ([Action(rank, kind, index) for index in range(micro_batches)] for kind in "FB")
    ahead = micro_batches if name == "GPipe" else min(micro_batches, ranks - rank)
    found = forward[:ahead]
    for index, one in enumerate(backward):
        found += [one, *forward[ahead + index : ahead + index + 1]]
    return tuple(found)


def _computed(actions: Sequence[Any]) -> Iterator[Action]:
    """Yield the computing actions among torch's; overlapped ones are sequential, as in torch's schedule runtime."""
    for action in actions:
        for part in () if action is None else (action.sub_actions or (action,)):
            kind = part.computation_type.value
            if kind in COMPUTE:
                yield Action(part.stage_index, kind, part.microbatch_index)


@functools.lru_cache(maxsize=64)
def _graph(
    ranks: tuple[tuple[Action, ...], ...], micro_batches: int, often: int, ahead: int = 0, *, waits_at_end: bool = False
) -> ActionGraph:
    return ActionGraph(
        [
            [
                action._replace(micro_batch=action.micro_batch + micro_batches * again) if again else action
                for again in range(often)
                for action in actions
            ]
            for actions in ranks
        ],
        micro_batches,
        ahead,
        waits_at_end=waits_at_end,
    )
