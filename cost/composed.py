"""Times of candidates composed of pieces, in which equal blocks and micro batches are timed a few times only.

The time of a step is that of an excerpt, in which the last spans of repeated blocks and micro batches stand for the
others, and kernels that follow each other pass as one. Where a step does not settle so, nothing is composed. Memory is
followed through every block and micro batch, so that it is to the byte that of whole simulation: the allocator's small
blocks settle late, or never.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.pieces import PieceOf
from legoai.cost.timing.breakdown import Breakdown
from legoai.cost.timing.engine import simulate
from legoai.cost.timing.intervals import since
from legoai.cost.timing.pace import Pace, Paced, keeps_pace
from legoai.cost.timing.repeats import (
    Weights,
    beginnings,
    runs_of,
    takes_time,
    weighted_breakdown,
)
from legoai.cost.trace.editing import is_micro_batch
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.trace import Trace
from legoai.dsl.analysis.flops import DECODERS
from legoai.specs.plan import Plan

_BLOCKS: Final = 5
"""Groups of repeated blocks that are timed beside those that were captured."""
_COMPARED: Final = 5
"""Beginnings of blocks that are compared; that of the last is not, behind which something else follows."""
_BATCHES: Final = 2
"""Micro batches that are timed beside those that were captured."""


def composes(plan: Plan, found: PieceOf) -> bool:
    """Whether figures may be composed: of a decoder with runs of blocks, whose work follows from its formula."""
    return plan.model.family in DECODERS and bool(found.piece.containers)


def composed_breakdown(found: PieceOf, machine: Machine) -> Breakdown | None:
    """The seconds of a step; None where its blocks or micro batches do not settle.

    Args:
        found: a piece that :func:`composes`.
        machine: on which it runs.
    """
    piece = found.piece
    missing = piece.missing(found.depths)
    left = tuple(min(_BLOCKS + (more - _BLOCKS) % 2, more) for more in missing)  # others take turns in twos
    batches = min(found.micro_batches, piece.taken + _BATCHES)
    excerpt = piece.excerpt(missing, left, batches)
    items = excerpt.between(excerpt.steps[-1])
    step = Trace(rank=excerpt.rank, world=excerpt.world, stage=0, items=items)
    try:
        timeline = simulate(step, OpCosts(machine=machine), machine.host(), by_run=True)
    except ValueError:  # it waits for what the first step began
        return None
    marks = dict(timeline.marks)
    begin, end = (marks[name] for name in (items[0].name, items[-1].name))  # type: ignore[union-attr]
    intervals = since(timeline.intervals, begin)
    pace = Pace(items, beginnings(items, intervals), marks, begin, cost=OpCosts(machine=machine), host=machine.host())
    of_blocks = list(_of_blocks(items, pace, piece.containers_of_segments(), missing, left))
    of_batches = list(_of_batches(items, pace, found.micro_batches - batches, piece.taken // 2, batches))
    spans = [paced for paced in (*of_blocks, *of_batches) if paced is not None]
    if len(spans) < len(of_blocks) + len(of_batches) or not keeps_pace(
        spans[: len(of_blocks)], spans[len(of_blocks) :]
    ):
        return None
    weights = Weights([paced.span for paced in spans])
    return weighted_breakdown(intervals, max(end - begin, intervals.end), weights)


def _of_blocks(
    items: Sequence[Item],
    pace: Pace,
    containers: Mapping[int, Collection[int]],
    missing: Sequence[int],
    left: Sequence[int],
) -> Iterator[Paced | None]:
    """The spans that stand for further blocks, in each pass of each micro batch.

    Args:
        items: of the excerpt.
        pace: of them.
        containers: of repeated blocks, by the identity of the segments that they repeat.
        missing: groups of blocks of each container beside those that were captured.
        left: of these, those that are in the excerpt.
    """
    for run in runs_of(items):
        first = items[run.start]
        if not isinstance(first, Instance) or not takes_time(first.segment):
            continue
        segments = {id(item.segment) for place in run if isinstance(item := items[place], Instance)}
        own = {container for segment in segments for container in containers.get(segment, ())}
        more = sum(missing[container] - left[container] for container in own)
        if more and len(run) > sum(left[container] for container in own):
            yield pace.settled(run[-_COMPARED - 1 : -1], more)


def _of_batches(items: Sequence[Item], pace: Pace, more: int, first: int, count: int) -> Iterator[Paced | None]:
    """The span that stands for further micro batches."""
    if not more:
        return
    found: list[int] = []
    begun = False
    for place, item in enumerate(items):
        if not isinstance(item, Instance):
            begun = begun or is_micro_batch(item)
        elif begun and pace.starts[place] is not None:
            found.append(place)
            begun = False
    yield pace.settled(found[first : first + _BATCHES + 1], more) if len(found) == count else None
