"""Observed memory of pipeline ranks at the points of a step, from which other treatments of stages are predicted.

Each stage has one point: its backward with the highest peak, followed block by block. The activations that its blocks
hold there are those of all in-flight micro batches of the stage. On a rank with several stages, the other stages also
hold the activations of their own in-flight micro batches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from legoai.cost.memory.effects import effect_of
from legoai.cost.memory.following import change
from legoai.cost.trace.marks import ACTION, END_ACTION
from legoai.cost.trace.records import Allocate, Free, Kernel, Mark, Resize
from legoai.cost.trace.segments import Instance, Item
from legoai.dsl.analysis.facts import of_innermost

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate, RankEstimate
    from legoai.specs.models.manifests.manifest import Manifest

_COMPUTES: Final = re.compile(r"(\d+)([FBIW])\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePoints:
    """Active memory of a rank in the backward of one stage, the one with the highest peak, in bytes.

    Attributes:
        stage: index of the stage.
        before: active bytes when the backward of its last block begins.
        peak: peak from the rank's previous backward to the end of the backward of the stage's last block.
        released: decrease by the backward of one block; negative where unsharded parameters accumulate.
        inside: peak in the backward of the last block, extrapolated from the other blocks.
        under_way: in-flight micro batches by stage of the rank, the one in backward included.
    """

    stage: int
    before: float
    peak: float
    released: float
    inside: float
    under_way: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPoints:
    """Active memory of a rank of a pipeline, in bytes.

    Attributes:
        stages: the point of each of its stages.
        elsewhere: peak in all other actions; 0 where it does not exceed the stages' peaks.
        optimizer: peak after all actions, while the optimizer runs.
        outside: bytes of the device used outside PyTorch's allocator.
    """

    stages: list[StagePoints] = field(default_factory=list)
    elsewhere: float = 0.0
    optimizer: float = 0.0
    outside: float = 0.0

    @staticmethod
    def read(document: Mapping[str, Any]) -> RankPoints:
        """The points from plain data, the inverse of `dataclasses.asdict`."""
        stages = [
            StagePoints(**{**one, "under_way": [(stage, count) for stage, count in one["under_way"]]})
            for one in document["stages"]
        ]
        return RankPoints(**{**document, "stages": stages})


def stage_points(found: Estimate, manifest: Manifest) -> list[RankPoints]:
    """The points of each rank of a pipeline; empty without a pipeline, or unless the model has one list of blocks."""
    lists = [item for item in manifest.block_lists if item.path]
    if len(lists) != 1 or not found.ranks[0].actions:
        return []
    places = {f"{lists[0].path}.{name}": place for place, name in enumerate(lists[0].names)}
    return [_rank_points(rank, places) for rank in found.ranks]


@dataclass(slots=True)
class _Interval:
    """An action, or the interval between two actions.

    Attributes:
        stage: stage of the action; -1 between actions.
        kind: kind of the action; empty between actions.
        before: active bytes when it begins.
        most: peak of active bytes.
        begin: sequence number of its first record.
        under_way: in-flight micro batches, by stage.
    """

    stage: int
    kind: str
    before: int
    most: int
    begin: int
    under_way: dict[int, int]


def _rank_points(rank: RankEstimate, places: Mapping[str, int]) -> RankPoints:
    intervals = list(_intervals(rank))
    actions = [place for place, interval in enumerate(intervals) if interval.kind]
    stages, passed = [], {len(intervals) - 1}
    chosen = []
    for stage in sorted({intervals[place].stage for place in actions}):
        backward = [place for place in actions if intervals[place].stage == stage and intervals[place].kind in "BI"]
        fullest = max(backward, key=lambda place: (intervals[place].most, -place))
        earlier = [place for place in actions if place < fullest and intervals[place].kind in "BIW"]
        chosen.append((fullest, range(max(earlier, default=-1) + 1, fullest)))
        passed |= {fullest, *chosen[-1][1]}
    blocks = _Blocks(rank, places, {intervals[place].begin for place, _ in chosen})
    for place, ahead in chosen:
        interval = intervals[place]
        seen, turn = blocks.found[interval.begin]
        if not seen:
            return RankPoints()
        first, last = seen[0], seen[-1]
        steps = first.block - last.block
        released = (first.before - last.before) / steps if steps else float(first.before - blocks.ends[interval.begin])
        stages.append(
            StagePoints(
                stage=interval.stage,
                before=first.before,
                peak=max([turn, first.most, *(intervals[one].most for one in ahead)]),
                released=released,
                inside=max([one.most + (first.block - one.block) * released for one in seen[1:]], default=first.most),
                under_way=sorted(interval.under_way.items()),
            )
        )
    reached = max(max(one.peak, intervals[place].most) for one, (place, _) in zip(stages, chosen, strict=True))
    others = [one.most for place, one in enumerate(intervals) if place not in passed and one.most > reached]
    return RankPoints(
        stages=stages,
        elsewhere=max(others, default=0),
        optimizer=intervals[-1].most,
        outside=rank.use.total - rank.use.reserved,
    )


def _intervals(rank: RankEstimate) -> Iterator[_Interval]:
    """Intervals of a rank's step: its actions and the intervals between them; the last one follows all actions."""
    now: _Interval | None = None
    under_way: Counter[int] = Counter()
    for index, active, most, item in _followed(rank, {Allocate, Free, Resize, Mark}):
        if index < rank.span.start:
            continue
        if now is None:
            now = _Interval(-1, "", active, active, index, {})
        now.most = max(now.most, most)
        if isinstance(item, Mark) and item.name.startswith((ACTION, END_ACTION)):
            yield now
            name = _COMPUTES.fullmatch(item.name.removeprefix(ACTION))
            if name is None:
                now = _Interval(-1, "", active, active, index, {})
                continue
            stage, kind = int(name[1]), name[2]
            under_way[stage] += kind == "F"
            now = _Interval(stage, kind, active, active, index, dict(under_way))
            under_way[stage] -= kind in "BI"
    assert now is not None, "a step of a pipeline has actions"
    yield now


@dataclass(slots=True)
class _BlockBackward:
    """Backward of one block: its index, and active bytes before it and at its peak."""

    block: int
    before: int
    most: int


class _Blocks:
    """Backward actions of a rank, block by block.

    Args:
        rank: the rank, with its trace.
        places: index of each block, by path.
        begins: sequence numbers of the marks at which the actions begin.

    Attributes:
        found: for each action, its blocks in the order of backward, and the peak before the first of them.
        ends: active bytes at the end of each action.
    """

    def __init__(self, rank: RankEstimate, places: Mapping[str, int], begins: set[int]) -> None:
        self.found: dict[int, tuple[list[_BlockBackward], int]] = {}
        self.ends: dict[int, int] = {}
        translation = rank.trace.translation
        now: int | None = None
        seen: list[_BlockBackward] = []
        turn = 0
        kinds = {Allocate, Free, Resize, Mark, Kernel}
        for index, active, most, item in _followed(rank, kinds, begins):
            if index >= rank.span.start and isinstance(item, Mark):
                if index in begins:
                    now, seen, turn = index, [], active
                elif now is not None and item.name.startswith(END_ACTION):
                    self.found[now], self.ends[now] = (seen, turn), active
                    now = None
            if now is None:
                continue
            if isinstance(item, Kernel) and item.phase in ("backward", "recompute") and item.module:
                place = of_innermost(item.module if translation is None else translation.path(item.module), places)
                if place is not None and (not seen or place < seen[-1].block):
                    seen.append(_BlockBackward(place, active, active))
            if seen:
                seen[-1].most = max(seen[-1].most, most)
            else:
                turn = max(turn, most)


def _followed(
    rank: RankEstimate, kinds: set[type], apart: AbstractSet[int] = frozenset()
) -> Iterator[tuple[int, int, int, Item]]:
    """Items of the trace up to the end of the step: sequence number, active bytes after it, and peak during it.

    Args:
        rank: the rank, with its trace.
        kinds: kinds of records to yield; segment instances are yielded too.
        apart: marks of actions whose segment instances are yielded record by record.
    """
    held: dict[int, int] = {}
    active, whole = 0, True
    for index, item in rank.trace.placed(kinds):
        if index >= rank.span.stop:
            return
        if isinstance(item, Mark) and item.name.startswith((ACTION, END_ACTION)):
            whole = index not in apart
        if isinstance(item, Instance) and whole:
            effect = effect_of(item, held, "other")
            most = active + effect.most
            active += effect.change
            effect.apply(item, held)
            yield index, active, max(most, active), item
            continue
        for record in item.records() if isinstance(item, Instance) else (item,):
            if type(record) not in kinds:
                continue
            if isinstance(record, Allocate | Free | Resize):
                active += change(held, record, record.storage)
            yield index, active, active, record
