"""What do the ranks of a pipeline do in a step, and how long do they wait for each other?

One rank of each place on the `pp` axis is simulated, the first on every other axis, as ranks that differ on other axes
only do the same. Each is captured as it is, its schedule being torch's own, in a process of its own where that is
possible. Then all of them are timed together (:mod:`legoai.cost.ranks`), each action as one piece
(:mod:`legoai.cost.pieces`).

The *bubble* of a rank is the share of the step in which its device does nothing because what is next waits for another
rank: for an activation or a gradient, for the sum of the gradient norm, or, at the end, for the last of the ranks. The
transfer itself counts where nothing is computed beside it. The bubble fraction of a step is the mean over the ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from legoai.cost.capture import capture
from legoai.cost.composed import items_between, records_of
from legoai.cost.device import Kind, SimulationError, backend
from legoai.cost.memory import steps
from legoai.cost.pieces import Pieces
from legoai.cost.ranks import RankTimeline, StandstillError, simulate_ranks
from legoai.cost.timeline import Cost, Host, Timed
from legoai.cost.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """One rank of a pipeline.

    Attributes:
        trace: what it was seen to do, from the setup on.
        times: of its second step, which begins at 0.
        bubble: share of the step in which it waits for others.
        measured: what `measure` said of the trace.
    """

    trace: Trace
    times: RankTimeline
    bubble: float
    measured: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """A step of all ranks, in the order of the `pp` axis.

    Attributes:
        seconds: from when the hosts begin until the last device is done.
        ranks: one of each place.
    """

    seconds: float
    ranks: tuple[PipelineRank, ...]

    @property
    def bubble(self) -> float:
        """The mean of the ranks' bubbles."""
        return sum(rank.bubble for rank in self.ranks) / len(self.ranks)

    @property
    def worst_bubble(self) -> float:
        """The largest of the ranks' bubbles."""
        return max(rank.bubble for rank in self.ranks)


def simulate_pipeline(
    program: str,
    *,
    world: int,
    places: int,
    kind: Kind,
    cost: Callable[[Timed], Cost],
    host: Host,
    measure: Callable[[Trace], Any] = lambda _: None,
    whole: bool = False,
) -> PipelineStep:
    """Capture one rank of each place on the `pp` axis, and time a step of all of them.

    Args:
        program: its text.
        world: number of ranks for which it was lowered; `pp` is the outermost axis.
        places: ranks of the `pp` axis.
        kind: whose kernels the device has.
        cost: of an operation when nothing runs beside it.
        host: of every rank.
        measure: is asked of each trace where it was captured, which may be another process: its memory, for example.
        whole: time every operation by itself instead of every action, which takes longer.

    Raises:
        SimulationError: the program cannot be captured, or its ranks wait for each other.
    """
    numbers = [place * (world // places) for place in range(places)]
    captured = _captured(program, numbers, world, kind, measure)
    pieces = Pieces(cost=cost, host=host, together=frozenset(numbers))
    records = {}
    for number, (trace, _) in zip(numbers, captured, strict=True):
        last = steps(trace)[-1]
        step = items_between(trace.records, last)
        records[number] = list(records_of(step)) if whole else pieces.compressed(step)
    try:
        times = simulate_ranks(records, cost, host)
    except StandstillError as error:
        raise SimulationError(str(error)) from error
    seconds = max(found.timeline.end for found in times.values())
    return PipelineStep(
        seconds=seconds,
        ranks=tuple(
            PipelineRank(trace=trace, times=times[number], bubble=_bubble(times[number], seconds), measured=measured)
            for number, (trace, measured) in zip(numbers, captured, strict=True)
        ),
    )


def _bubble(times: RankTimeline, seconds: float) -> float:
    waited = sum(end - start for start, end in times.waits)
    return (waited + seconds - times.timeline.end) / seconds if seconds else 0.0


def _captured(
    program: str, numbers: Sequence[int], world: int, kind: Kind, measure: Callable[[Trace], Any]
) -> list[tuple[Trace, Any]]:
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(numbers))
    if workers < 2 or not _may_fork():
        return [_capture(program, number, world, kind, measure) for number in numbers]
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=forked, initializer=_begin, initargs=(measure,)) as pool:
        found = [pool.submit(_capture_there, program, number, world, kind) for number in numbers]
        try:
            return [item.result() for item in found]
        except BrokenProcessPool:
            raise SimulationError("a process that captured a rank was killed; is there too little memory?") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _may_fork() -> bool:
    """Whether processes can be forked: autograd's threads, which a simulation starts, would be missing in them."""
    return backend.streams == 0 and hasattr(os, "fork") and not multiprocessing.current_process().daemon


_measured: list[Callable[[Trace], Any]] = []
"""What a forked process measures; it is forked with it, so that it need not be sent."""


def _begin(measure: Callable[[Trace], Any]) -> None:
    """Begin a forked process; an interrupt ends it without a word, as its parent tells of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _measured.append(measure)


def _capture_there(program: str, number: int, world: int, kind: Kind) -> tuple[Trace, Any]:
    return _capture(program, number, world, kind, _measured[-1])


def _capture(program: str, number: int, world: int, kind: Kind, measure: Callable[[Trace], Any]) -> tuple[Trace, Any]:
    trace = capture(program, world=world, rank=number, kind=kind)
    return trace, measure(trace)
