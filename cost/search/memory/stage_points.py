"""Observed memory of pipeline ranks at the points of a step, from which other treatments of stages are predicted.

The backward of a stage at its peak is followed block by block. What its blocks hold there belongs to all micro batches
in flight. A rank with several stages has such a point for each, at which its other stages hold what their own micro
batches left.
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
from legoai.dsl.analysis.facts import holders

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate, RankEstimate
    from legoai.specs.models.manifest import Manifest

_COMPUTES: Final = re.compile(r"(\d+)([FBIW])\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePoints:
    """Active memory of a rank in the backward of one of its stages that finds most of it, in bytes.

    Attributes:
        stage: whose backward it is.
        before: what is active when the backward of its last block begins.
        peak: the most since the backward before it, up to the end of that of its last block.
        released: less behind the backward of each block; more, where parameters stay gathered.
        inside: the most while the backward of the last block runs; as the line through the others gives it.
        under_way: micro batches between forward and backward, this one among them, by stage of the rank.
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
        stages: at the fullest backward of each of its stages.
        elsewhere: the most in the other actions; 0 where it is no more than in these.
        optimizer: the most behind all actions, while the optimizer runs.
        outside: bytes of the device that are taken outside of PyTorch.
    """

    stages: list[StagePoints] = field(default_factory=list)
    elsewhere: float = 0.0
    optimizer: float = 0.0
    outside: float = 0.0

    @staticmethod
    def read(document: Mapping[str, Any]) -> RankPoints:
        """The points whose fields are these, as plain data."""
        stages = [
            StagePoints(**{**one, "under_way": [(stage, count) for stage, count in one["under_way"]]})
            for one in document["stages"]
        ]
        return RankPoints(**{**document, "stages": stages})


def stage_points(found: Estimate, manifest: Manifest) -> list[RankPoints]:
    """The points of each rank of a pipeline; nothing without one, or of a model without one list of blocks."""
    lists = [item for item in manifest.block_lists if item.path]
    if len(lists) != 1 or not found.ranks[0].actions:
        return []
    places = {f"{lists[0].path}.{name}": place for place, name in enumerate(lists[0].names)}
    return [_rank_points(rank, places) for rank in found.ranks]


@dataclass(slots=True)
class _Piece:
    """An action, or what is between two of them.

    Attributes:
        stage: of the action; -1 between them.
        kind: likewise, or nothing.
        before: what is active when it begins.
        most: the most that is active while it lasts.
        begin: sequence number of its first record.
        under_way: micro batches, by stage.
    """

    stage: int
    kind: str
    before: int
    most: int
    begin: int
    under_way: dict[int, int]


def _rank_points(rank: RankEstimate, places: Mapping[str, int]) -> RankPoints:
    pieces = list(_pieces(rank))
    actions = [place for place, piece in enumerate(pieces) if piece.kind]
    stages, passed = [], {len(pieces) - 1}
    chosen = []
    for stage in sorted({pieces[place].stage for place in actions}):
        backward = [place for place in actions if pieces[place].stage == stage and pieces[place].kind in "BI"]
        fullest = max(backward, key=lambda place: (pieces[place].most, -place))
        earlier = [place for place in actions if place < fullest and pieces[place].kind in "BIW"]
        chosen.append((fullest, range(max(earlier, default=-1) + 1, fullest)))
        passed |= {fullest, *chosen[-1][1]}
    blocks = _Blocks(rank, places, {pieces[place].begin for place, _ in chosen})
    for place, ahead in chosen:
        piece = pieces[place]
        seen, turn = blocks.found[piece.begin]
        if not seen:
            return RankPoints()
        first, last = seen[0], seen[-1]
        steps = first.place - last.place
        released = (first.before - last.before) / steps if steps else float(first.before - blocks.ends[piece.begin])
        stages.append(
            StagePoints(
                stage=piece.stage,
                before=first.before,
                peak=max([turn, first.most, *(pieces[one].most for one in ahead)]),
                released=released,
                inside=max([one.most + (first.place - one.place) * released for one in seen[1:]], default=first.most),
                under_way=sorted(piece.under_way.items()),
            )
        )
    reached = max(max(one.peak, pieces[place].most) for one, (place, _) in zip(stages, chosen, strict=True))
    others = [piece.most for place, piece in enumerate(pieces) if place not in passed and piece.most > reached]
    return RankPoints(
        stages=stages,
        elsewhere=max(others, default=0),
        optimizer=pieces[-1].most,
        outside=rank.use.total - rank.use.reserved,
    )


def _pieces(rank: RankEstimate) -> Iterator[_Piece]:
    """The actions of a rank's step, and what is between them; the last is what is behind them all."""
    now: _Piece | None = None
    under_way: Counter[int] = Counter()
    for index, active, most, item in _followed(rank, {Allocate, Free, Resize, Mark}):
        if index < rank.span.start:
            continue
        if now is None:
            now = _Piece(-1, "", active, active, index, {})
        now.most = max(now.most, most)
        if isinstance(item, Mark) and item.name.startswith((ACTION, END_ACTION)):
            yield now
            name = _COMPUTES.fullmatch(item.name.removeprefix(ACTION))
            if name is None:
                now = _Piece(-1, "", active, active, index, {})
                continue
            stage, kind = int(name[1]), name[2]
            under_way[stage] += kind == "F"
            now = _Piece(stage, kind, active, active, index, dict(under_way))
            under_way[stage] -= kind in "BI"
    assert now is not None, "a step of a pipeline has actions"
    yield now


@dataclass(slots=True)
class _Passed:
    """A block's backward: its place, what is active before it, and the most while it lasts."""

    place: int
    before: int
    most: int


class _Blocks:
    """Backward actions of a rank, block by block.

    Args:
        rank: with its trace.
        places: of the blocks, by path.
        begins: sequence numbers of the marks of the actions.

    Attributes:
        found: of each action the blocks in the order of backward, and the most before the first of them.
        ends: what is active behind each.
    """

    def __init__(self, rank: RankEstimate, places: Mapping[str, int], begins: set[int]) -> None:
        self.found: dict[int, tuple[list[_Passed], int]] = {}
        self.ends: dict[int, int] = {}
        translation = rank.trace.translation
        now: int | None = None
        seen: list[_Passed] = []
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
                place = _holder(item.module if translation is None else translation.path(item.module), places)
                if place is not None and (not seen or place < seen[-1].place):
                    seen.append(_Passed(place, active, active))
            if seen:
                seen[-1].most = max(seen[-1].most, most)
            else:
                turn = max(turn, most)


def _holder(path: str, places: Mapping[str, int]) -> int | None:
    """The block that a module is, or lies in."""
    return next((places[above] for above in (path, *holders(path)) if above in places), None)


def _followed(
    rank: RankEstimate, kinds: set[type], apart: AbstractSet[int] = frozenset()
) -> Iterator[tuple[int, int, int, Item]]:
    """Every item of some kinds up to the end of the step, with what is active behind it and the most while it lasts.

    Args:
        rank: with its trace.
        kinds: of records; instances are yielded too.
        apart: marks of actions whose records are yielded one by one, also where they are an instance.
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
