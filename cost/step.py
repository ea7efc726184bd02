"""Simulated step of a pipeline: one rank per `pp` coordinate, captured apart and timed together.

For each coordinate on the `pp` axis one rank is simulated; ranks that differ only on other axes do the same, or less.
The ranks are captured with torch's own schedule, each in a process of its own where possible. Then all of them are
timed together (:mod:`legoai.cost.timing.engine`), each action as one op (:mod:`legoai.cost.timing.actions`).

The *bubble* of a rank is the share of the step in which its device is idle because its next op waits for another rank:
for an activation or a gradient, for the sum of the gradient norm, or, at the end, for the slowest rank. The transfer
itself is no part of it, but exposed communication. The bubble fraction of a step is the mean over the ranks.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from legoai.cost.capture import capture_equal_ranks
from legoai.cost.pipelines.equal_stages import equal_coordinates
from legoai.cost.simulated.device import Kind, SimulationError
from legoai.cost.simulated.forking import begin_forked, may_fork
from legoai.cost.timing.actions import ActionTimer
from legoai.cost.timing.engine import simulate_ranks
from legoai.cost.timing.intervals import RESOURCES, busy_until
from legoai.cost.timing.rank_timeline import RankTimeline, StandstillError
from legoai.cost.timing.timeline import Cost, Host, Timed
from legoai.cost.trace.records import Collective
from legoai.cost.trace.trace import Trace
from legoai.lowering.program import Program
from legoai.runtime.launching.signals import held_signals
from legoai.specs.cluster import Device
from legoai.specs.cores import cores


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """One rank of a pipeline.

    Attributes:
        trace: of the rank, from the setup on.
        times: of its second step, which begins at 0.
        bubble: share of the step in which it waits for others and communicates with none.
        measured: the result of `measure` for the trace.
    """

    trace: Trace
    times: RankTimeline
    bubble: float
    measured: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """A step of all ranks, in the order of the `pp` axis.

    Attributes:
        seconds: from the start of the hosts until the last device is done.
        ranks: one of each coordinate.
    """

    seconds: float
    ranks: tuple[PipelineRank, ...]

    @property
    def bubble(self) -> float:
        """The mean of the ranks' bubbles."""
        return sum(rank.bubble for rank in self.ranks) / len(self.ranks)


def simulate_pipeline(
    program: Program,
    *,
    world: int,
    pp: int,
    first: int = 0,
    kind: Kind,
    gpu: Device | None = None,
    cost: Callable[[Timed], Cost],
    host: Host,
    measure: Callable[[Trace], Any] = lambda _: None,
) -> PipelineStep:
    """Capture one rank of each coordinate on the `pp` axis, and time a step of all of them.

    Args:
        program: as lowered.
        world: number of ranks for which it was lowered; `pp` is the outermost axis.
        pp: ranks along the `pp` axis.
        first: the simulated rank of the first coordinate.
        kind: of device, which decides the kernels.
        gpu: the plan's device, whose properties a compiled program depends on; None where it is no GPU.
        cost: of an operation when nothing runs beside it.
        host: of every rank.
        measure: called on each trace in the process that captured it, for example to measure its memory.

    Raises:
        SimulationError: the program cannot be captured, or its ranks wait for each other.
    """
    numbers = [first + coordinate * (world // pp) for coordinate in range(pp)]
    job = _Job(program, world, pp, first, kind, gpu)
    captured = _captured(job, measure)
    elsewhere = [[coordinate] for coordinate, (trace, _) in enumerate(captured) if not _costs_the_same(trace, cost)]
    for coordinate, found in _in_processes(job, elsewhere, measure):
        captured[coordinate] = found
    timer = ActionTimer(cost=cost, host=host, together=frozenset(numbers))
    records = {}
    for number, (trace, _) in zip(numbers, captured, strict=True):
        step, translation = trace.between(trace.steps[-1]), trace.translation
        records[number] = timer.compressed(step, translation)
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


def _costs_the_same(trace: Trace, cost: Callable[[Timed], Cost]) -> bool:
    """Whether the collectives of a derived trace cost as much as those of the captured rank.

    Where the ranks of a coordinate do not fill whole hosts, process groups of different coordinates may be placed on
    hosts differently.
    """
    translation = trace.translation
    if translation is None:
        return True
    seen = {
        (item.kind, item.ranks, item.bytes): item
        for item in trace.once_each()
        if isinstance(item, Collective) and item.kind not in ("send", "receive")
    }
    return all(cost(item).seconds == cost(translation.collective(item)).seconds for item in seen.values())


def _bubble(times: RankTimeline, seconds: float) -> float:
    """Return the share of a step in which a rank waits and nothing runs on its device or links."""
    starts, ends = np.reshape(times.waits, (-1, 2)).T
    busy = busy_until(times.timeline.intervals, RESOURCES)
    waited = float((ends - starts - busy(ends) + busy(starts)).sum())
    return (waited + seconds - times.timeline.end) / seconds if seconds else 0.0


def _captured(job: _Job, measure: Callable[[Trace], Any]) -> list[tuple[Trace, Any]]:
    groups: list[Sequence[int]] = sorted(equal_coordinates(job.program, job.pp), key=len, reverse=True)
    found: dict[int, tuple[Trace, Any]] = {}
    while groups:
        found |= dict(_in_processes(job, groups, measure))
        groups = list(_left(groups, found))
    return [found[coordinate] for coordinate in range(job.pp)]


def _left(groups: Iterable[Sequence[int]], found: Container[int]) -> Iterator[Sequence[int]]:
    """Yield what remains of groups whose traces could not all be derived from the first rank of the group.

    For example, a rank may all-gather a stage more often. If the traces of some ranks could be derived, those of the
    remaining ones may be derivable from each other, so that they form a group again; otherwise each is captured.
    """
    for group in groups:
        left = [coordinate for coordinate in group if coordinate not in found]
        if len(left) + 1 < len(group):
            yield from [left] if left else []
        else:
            yield from ([coordinate] for coordinate in left)


@dataclass(frozen=True, slots=True)
class _Job:
    """Capture job of a pipeline: its program, number of ranks, length of the `pp` axis, first rank, and devices."""

    program: Program
    world: int
    pp: int
    first: int
    kind: Kind
    gpu: Device | None

    def captured(self, group: Sequence[int], measure: Callable[[Trace], Any]) -> list[tuple[int, tuple[Trace, Any]]]:
        """Capture the first rank of a group with equal stages, and derive the traces of the others where possible."""
        traces = capture_equal_ranks(
            self.program, world=self.world, pp=self.pp, first=self.first, coordinate=group[0], others=group[1:],
            kind=self.kind, gpu=self.gpu,
        )  # fmt: skip
        return [(trace.stage, (trace, measure(trace))) for trace in traces]


def _in_processes(
    job: _Job, groups: Sequence[Sequence[int]], measure: Callable[[Trace], Any]
) -> Iterator[tuple[int, tuple[Trace, Any]]]:
    workers = min(cores(), len(groups))
    if workers < 2 or not may_fork():
        for group in groups:
            yield from job.captured(group, measure)
        return
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=forked, initializer=_begin, initargs=(job, measure)) as pool:
        try:
            with held_signals():
                found = [pool.submit(_capture_there, group) for group in groups]
            for item in found:
                yield from item.result()
        except BrokenProcessPool:
            raise SimulationError("a process that captured a rank was killed; is there too little memory?") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_jobs: list[tuple[_Job, Callable[[Trace], Any]]] = []
"""Job and measurement of a forked process, inherited by forking so that it need not be pickled."""


def _begin(job: _Job, measure: Callable[[Trace], Any]) -> None:
    """Initialise a forked process; an interrupt ends it silently, since its parent reports it."""
    begin_forked(signal.SIG_DFL)
    _jobs.append((job, measure))


def _capture_there(group: Sequence[int]) -> list[tuple[int, tuple[Trace, Any]]]:
    job, measure = _jobs[-1]
    return job.captured(group, measure)
