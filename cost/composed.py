"""Step times of plans extrapolated from an excerpt with few repeated blocks and micro batches.

The excerpt is timed, and the spans of its last repeated blocks and micro batches are weighted by the number of those
that were left out. Consecutive kernels are simulated as one node. If the spans do not reach a steady state, there is no
extrapolated time. Memory is not extrapolated: the allocator's small blocks reach a steady state late or never, so
memory is simulated through every block and micro batch, exactly to the byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.pieces import PieceOf
from legoai.cost.timing.breakdown import Breakdown
from legoai.cost.timing.engine import simulate
from legoai.cost.timing.intervals import Floats, Intervals, since, spans
from legoai.cost.timing.pace import Pace, Paced, keeps_pace
from legoai.cost.timing.repeats import (
    Span,
    Weights,
    beginnings,
    runs_of,
    takes_time,
    weighted_breakdown,
)
from legoai.cost.timing.timeline import COMMUNICATION
from legoai.cost.trace.editing import is_micro_batch
from legoai.cost.trace.records import Collective, Kernel
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.trace import Trace

_BLOCKS: Final = 5
"""Groups of repeated blocks that are timed in addition to the captured ones."""
_COMPARED: Final = 5
"""Starts of blocks that are compared."""
_ENDING: Final = (1, 2)
"""Last blocks that are left out: other things follow them, whose weights may be gathered beside the last but one."""
_BATCHES: Final = 2
"""Micro batches that are timed in addition to the captured ones."""
_CATCHING_UP: Final = 2
"""Further ones, after which the host's lead over the device no longer changes."""
BETWEEN_LAYERS: Final = ("tp", "cp")
"""Axes whose collectives are between layers, in the same groups whatever the data-parallel degrees are."""
_LINK_BUSY: Final = 0.95
"""Share of a span; on links that are busy for longer, collectives may wait for those of the previous span."""


class SteadyPass(NamedTuple):
    """What each further block adds to passes of a micro batch, in the steady state of a step.

    Attributes:
        seconds: added to the step.
        collectives: seconds of the collectives of data-parallel ranks during that time, by kind.
    """

    seconds: float
    collectives: Mapping[str, float]


class SteadyBlock(NamedTuple):
    """What each further block adds to a micro batch: to its forward, and to all passes."""

    forward: SteadyPass
    everything: SteadyPass

    @staticmethod
    def read(document: Sequence[Any]) -> SteadyBlock:
        """The block whose fields are these, as plain data."""
        return SteadyBlock(*(SteadyPass(*one) for one in document))


class _Run(NamedTuple):
    """A run of repeated blocks in an excerpt: the index of its first item, and the span for further blocks."""

    place: int
    paced: Paced


class Composed(NamedTuple):
    """The time of a step, and what each block adds; None where blocks differ, or links are always busy."""

    breakdown: Breakdown
    block: SteadyBlock | None


def composed_breakdown(found: PieceOf, machine: Machine) -> Composed | None:
    """Return the time of a step, in seconds; None where its micro batches reach no steady state.

    Args:
        found: a piece with repeated blocks.
        machine: on which it runs.
    """
    piece = found.piece
    missing = piece.missing(found.depths)
    left = tuple(min(_BLOCKS + (more - _BLOCKS) % 2, more) for more in missing)  # an even number is left out
    composed = _composed(found, machine, missing, left)
    if composed is None and left != missing and piece.taken + _BATCHES + _CATCHING_UP < found.micro_batches:
        # Where the host is slower than the device in one pass only, blocks differ, but micro batches soon do not.
        return _composed(found, machine, missing, missing, _CATCHING_UP)
    return composed


def _composed(
    found: PieceOf, machine: Machine, missing: tuple[int, ...], left: tuple[int, ...], catching_up: int = 0
) -> Composed | None:
    """Extrapolate from an excerpt, or return None where it reaches no steady state.

    Args:
        found: the piece.
        machine: on which it runs.
        missing: for each container, groups of blocks that were not captured.
        left: for each container, how many of these are in the excerpt.
        catching_up: micro batches of the excerpt that may differ, in addition.
    """
    piece = found.piece
    batches = min(found.micro_batches, piece.taken + _BATCHES + catching_up)
    excerpt = piece.excerpt(missing, left, batches)
    items = excerpt.between(excerpt.steps[-1])
    step = Trace(rank=excerpt.rank, world=excerpt.world, stage=0, items=items)
    try:
        timeline = simulate(step, OpCosts(machine=machine), machine.host(), by_run=True)
    except ValueError:  # the step waits for an op of the first step
        return None
    marks = dict(timeline.marks)
    begin, end = (marks[name] for name in (items[0].name, items[-1].name))  # type: ignore[union-attr]
    intervals = since(timeline.intervals, begin)
    pace = Pace(items, beginnings(items, intervals), marks, begin, cost=OpCosts(machine=machine), host=machine.host())
    of_blocks = list(_of_blocks(items, pace, piece.containers_of_segments(), missing, left))
    first = piece.taken // 2 + catching_up
    of_batches = list(_of_batches(items, pace, found.micro_batches - batches, first, batches))
    runs = [_Run(place, paced) for place, paced in of_blocks if paced is not None]
    settled = [paced for paced in of_batches if paced is not None]
    if len(runs) < len(of_blocks) or len(settled) < len(of_batches):
        return None
    if not keeps_pace([run.paced for run in runs], settled):
        return None
    weights = Weights([paced.span for paced in (*(run.paced for run in runs), *settled)])
    block = None
    # Where the host is the bottleneck, a block may catch up with the time that another has left.
    if len(missing) == 1 and runs and all(run.paced.gain > 0.0 for run in runs):
        block = _steady_block(items, intervals, runs, weights, (missing[0] - left[0]) * found.micro_batches)
    return Composed(weighted_breakdown(intervals, max(end - begin, intervals.end), weights), block)


def _steady_block(
    items: Sequence[Item], intervals: Intervals, runs: Sequence[_Run], weights: Weights, further: int
) -> SteadyBlock | None:
    """What a block adds to a micro batch.

    Where a link is idle at times in each span, nothing waits for it that a span before has begun: what a block adds
    follows from its own kernels, whatever the blocks beside it recompute.

    Args:
        items: of the excerpt.
        intervals: of the excerpt.
        runs: of blocks, whose spans stand for further ones.
        weights: how often each moment counts.
        further: times that a block is run which the spans stand for, in all micro batches.
    """
    for link in COMMUNICATION:
        begun, done = spans(intervals, (link,))
        for run in runs:
            if _overlap(begun, done, run.paced.span) > _LINK_BUSY * run.paced.took:
                return None
    in_forward = [run.paced.span for run in runs if _is_forward(items[run.place])]
    forward = _steady_pass(intervals, in_forward, weights, further)
    return SteadyBlock(forward, _steady_pass(intervals, [run.paced.span for run in runs], weights, further))


def _steady_pass(intervals: Intervals, of_blocks: Sequence[Span], weights: Weights, further: int) -> SteadyPass:
    starts, ends = np.array([span.start for span in of_blocks]), np.array([span.end for span in of_blocks])
    # A moment counts once for itself, and as often as there are further blocks.
    times = weights.at(starts) * [span.more / (1 + span.more) for span in of_blocks]
    collectives: defaultdict[str, float] = defaultdict(float)
    for at, held in intervals.segments:
        for place in held.collectives.tolist():
            interval = held.intervals[place]
            record, begin = interval.record, at + interval.start
            assert isinstance(record, Collective)
            if record.axis not in BETWEEN_LAYERS:
                inside = (starts <= begin) & (begin < ends)
                collectives[record.kind] += (interval.end - interval.start) * float(times[inside].sum())
    seconds = float(((ends - starts) * times).sum())
    return SteadyPass(seconds / further, {kind: took / further for kind, took in collectives.items() if took})


def _is_forward(item: Item) -> bool:
    """Whether an instance of a segment runs in forward."""
    records = item.segment.records if isinstance(item, Instance) else ()
    return next((record.phase for record in records if isinstance(record, Kernel)), None) == "forward"


def _overlap(begun: Floats, done: Floats, span: Span) -> float:
    """Seconds of a span in which any of some disjoint intervals lies."""
    return float(np.maximum(0.0, np.minimum(done, span.end) - np.maximum(begun, span.start)).sum())


def _of_blocks(
    items: Sequence[Item],
    pace: Pace,
    containers: Mapping[int, Collection[int]],
    missing: Sequence[int],
    left: Sequence[int],
) -> Iterator[tuple[int, Paced | None]]:
    """Yield the spans that represent further blocks in each pass, with the index of their first item.

    Args:
        items: of the excerpt.
        pace: of the items.
        containers: of repeated blocks, by the identity of the segments that they repeat.
        missing: for each container, groups of blocks that were not captured.
        left: for each container, how many of the missing groups are in the excerpt.
    """
    for run in runs_of(items):
        first = items[run.start]
        if not isinstance(first, Instance) or not takes_time(first.segment):
            continue
        segments = {id(item.segment) for place in run if isinstance(item := items[place], Instance)}
        own = {container for segment in segments for container in containers.get(segment, ())}
        more = sum(missing[container] - left[container] for container in own)
        if more and len(run) > sum(left[container] for container in own):
            found = (pace.settled(run[-_COMPARED - ending : -ending], more) for ending in _ENDING)
            yield run.start, next(filter(None, found), None)


def _of_batches(items: Sequence[Item], pace: Pace, more: int, first: int, count: int) -> Iterator[Paced | None]:
    """Yield the span that represents further micro batches."""
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
