"""Timing of a function on this machine, alone or on every rank of the host at once."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from legoai.specs.units import GIB

_TOGETHER: float = 5e-3
"""Seconds of one repetition where ranks share the host: longer than a time slice of the scheduler (3 ms on Linux)."""

CACHE_BYTES: Final = 2**27
"""More than twice the last-level caches of calibrated devices: 32 MiB of one EPYC core complex, 50 MB of an H100."""
_PLUG_BYTES: Final = GIB
"""Memory that is filled while launches are queued: a third of a millisecond on an H100."""
_QUEUED: Final = 400
"""Most launches in a queue, of the thousand that CUDA holds before the host waits."""
_MOST_SETS: Final = 512
"""Most sets of operands; small operands stay in a cache in a training step too."""


def out_of_cache(make: Callable[[], Callable[[], object]], moved: float, *, least: int = 1) -> Callable[[], object]:
    """Return a run that cycles through enough sets of operands to exceed the caches twice.

    A training step reads most data long after it was written. Repeated on one set of operands, a kernel would find them
    in a cache, and its result would reuse the same memory, so that it would seem several times as fast. Results are
    kept as long as their operands are not used again.

    Args:
        make: allocates a set of operands and returns a run on it.
        moved: bytes that a run moves.
        least: fewest sets of operands, for operands that are larger than the caches.
    """
    sets = max(least, min(_MOST_SETS, math.ceil(CACHE_BYTES / moved)))
    runs = itertools.cycle([make() for _ in range(sets)])
    results: deque[object] = deque(maxlen=sets)

    def run() -> object:
        results.append(next(runs)())
        return results[-1]

    for _ in range(sets):
        run()  # the operating system maps the memory of the results on first access
    return run


@dataclass(frozen=True, slots=True)
class Budget:
    """Remaining seconds of a calibration; a measurement ends when its share is spent."""

    deadline: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """From now on."""
        return cls(time.perf_counter() + seconds)

    def left(self) -> float:
        """Seconds that remain; never negative."""
        return max(0.0, self.deadline - time.perf_counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """Timer of functions on a device.

    Attributes:
        device: torch's device type.
        group: ranks that share the cores and the memory of one host. All of them run the same function at the same
            time, as in training, and a time is measured under that load. None measures this process alone.
    """

    device: str
    group: dist.ProcessGroup | None = None

    def seconds(self, run: Callable[[], object], budget: float) -> float:
        """Return the median seconds of ``run`` over repetitions within about ``budget`` seconds."""
        if self.group is None:
            return measure(run, self.device, budget)
        run()
        begin = time.perf_counter()
        run()
        once = self._agreed(max(time.perf_counter() - begin, 1e-7))
        inner = max(1, min(10_000, math.ceil(_TOGETHER / once)))
        times = []
        for _ in range(int(min(20, max(3, budget / (inner * once))))):
            self._agreed(0.0)
            start = time.perf_counter()
            for _ in range(inner):
                run()
            times.append((time.perf_counter() - start) / inner)
        return statistics.median(times)

    def has_time_left(self, budget: Budget) -> bool:
        """Whether a budget is not spent, by the clock of the first rank."""
        if self.group is None:
            return budget.left() > 0.0
        left = torch.tensor([budget.left()], dtype=torch.float64)
        dist.broadcast(left, src=dist.get_global_rank(self.group, 0), group=self.group)
        return bool(left > 0.0)

    def _agreed(self, value: float) -> float:
        """Return the maximum of the ranks' values; also a barrier of the ranks."""
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return float(largest)


def measure(run: Callable[[], object], device: str, budget: float) -> float:
    """Return the median seconds of ``run``, over repetitions within ``budget`` seconds.

    Each repetition runs often enough to last half a millisecond. The minimum would reflect a clock rate that the
    machine cannot sustain, and a moment in which nothing else ran; training has neither.
    """
    if device == "cuda":
        return _on_gpu(run, budget)
    run()
    begin = time.perf_counter()
    run()
    once = max(time.perf_counter() - begin, 1e-7)
    inner = max(1, min(1000, math.ceil(5e-4 / once)))
    times: list[float] = []
    end = begin + budget
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - start) / inner)
        if once * inner > budget and len(times) >= 2:
            break
    return statistics.median(times)


def _on_gpu(run: Callable[[], object], budget: float) -> float:
    """As :func:`measure` on a GPU, by its own clock, its queue being full.

    A small kernel takes less time than its launch. The launches are therefore hidden behind other work: while the GPU
    fills memory for a while, the host issues all repetitions, which then follow each other without gaps.
    """
    plug = torch.empty(_PLUG_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(2):  # the first run loads and chooses kernels
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        issue = time.perf_counter() - begin
        torch.cuda.synchronize()
        once = max(time.perf_counter() - begin, 1e-6)
    filling = _between(plug.zero_, 4)
    inner = max(1, min(_QUEUED, math.ceil(5e-4 / once)))
    plugs = min(_QUEUED, math.ceil(1.5 * inner * issue / filling) + 1)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        for _ in range(plugs):
            plug.zero_()
        times.append(_between(run, inner))
        if once * inner > budget and len(times) >= 2:
            break
    return statistics.median(times)


def _between(run: Callable[[], object], times: int) -> float:
    """Seconds of a run by the GPU's clock, of several behind what is queued."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e-3 / times
