"""Times of kernels in a trace, by what they compute.

On a CPU, the time of a call that the simulator records as one kernel includes that of all nested calls. On a GPU, it is
the time of the kernels that the call and its nested calls launched. Work inside a collective belongs to the collective.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from legoai.cost.calibration.observed.calls import DTYPES, Calls
from legoai.cost.calibration.observed.trace_files import Call, DeviceKernel, Launch, TraceFile
from legoai.cost.kernels.kinds import Work
from legoai.cost.kernels.work import work_of
from legoai.cost.trace.records import Kernel

MICROSECONDS: Final = 1e-6
_COMMUNICATION: Final = ("c10d::", "_c10d_functional::", "record_param_comms", "nccl:", "gloo:", "mpi:", "ucc:")
_BACKWARD: Final = "autograd::engine::"
_WAITS: Final = ("Synchronize", "cudaMemcpy")
_FEW: Final = 64
"""Elements of a tensor too small to matter, such as a learning rate."""

Interval: TypeAlias = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class KernelTimes:
    """Measured times of kernels.

    Attributes:
        seconds: of each kernel, in order, by what it computes.
        beside: the same for kernels that ran at the same time as a collective on the same GPU.
        unknown: seconds of operators for which the trace lacks details, by name.
        host: seconds of the host for each operator: on a CPU between two operators; on a GPU from the start of one to
            the start of the next, by `dispatch` (autograd) and `python` (all else).
    """

    seconds: dict[Work, list[float]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[Work, list[float]] = field(default_factory=lambda: defaultdict(list))
    unknown: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: KernelTimes) -> None:
        """Add the times of another trace."""
        for own, more in ((self.seconds, other.seconds), (self.beside, other.beside), (self.host, other.host)):
            for key, times in more.items():
                own[key].extend(times)  # type: ignore[index]
        for name, seconds in other.unknown.items():
            self.unknown[name] += seconds


@dataclass(slots=True)
class _Owner:
    """A call that the simulator records as one kernel, with the intervals of the kernels that it launched."""

    call: Call
    kernel: Kernel | None
    backward: bool
    launched: list[Interval] = field(default_factory=list)


@dataclass(slots=True)
class _Frame:
    """An open call: the kernel that it belongs to, and whether it communicates."""

    call: Call
    owner: _Owner | None
    communicates: bool
    backward: bool


def kernel_times(trace: TraceFile, *, tf32: bool = False) -> KernelTimes:
    """Return the times of kernels in one trace; ``tf32`` is that of :func:`~legoai.cost.kernels.work.work_of`."""
    owners, of_launch, of_call = _owners(trace)
    found = KernelTimes()
    if not trace.on_device:
        for owner in owners:
            _note(found, owner, owner.call.end - owner.call.start, beside=False, tf32=tf32)
        found.host["gap"] = _gaps(trace, owners)
        return found
    collectives = merged((item.start, item.end) for item in trace.kernels if item.collective is not None)
    for kernel in trace.kernels:
        if kernel.collective is not None:
            continue
        launching = _owner_of(kernel, of_launch, of_call)
        if launching is not None:
            launching.launched.append((kernel.start, kernel.end))
        else:
            found.unknown[_short(kernel.name)] += (kernel.end - kernel.start) * MICROSECONDS
    for owner in owners:
        if owner.launched:
            lasts = math.fsum(end - start for start, end in owner.launched)
            beside = any(overlaps(one, collectives) for one in owner.launched)
            _note(found, owner, lasts, beside=beside, tf32=tf32)
    for kind, times in _issue_times(trace.launches, owners).items():
        found.host[kind] = times
    return found


def _note(found: KernelTimes, owner: _Owner, microseconds: float, *, beside: bool, tf32: bool) -> None:
    seconds = microseconds * MICROSECONDS
    if owner.kernel is None:
        found.unknown[owner.call.name] += seconds
    elif seconds > 0:
        (found.beside if beside else found.seconds)[work_of(owner.kernel, tf32=tf32)].append(seconds)


def _owner_of(kernel: DeviceKernel, of_launch: dict[int, _Owner | None], of_call: dict[int, _Owner]) -> _Owner | None:
    """Return the owner of a kernel by the driver call that launched it, or else by the operator's number."""
    if kernel.correlation in of_launch:
        return of_launch[kernel.correlation]
    return of_call.get(kernel.external)


def _owners(trace: TraceFile) -> tuple[list[_Owner], dict[int, _Owner | None], dict[int, _Owner]]:
    """Return the simulator's kernels, and for each launch and call the kernel that it belongs to."""
    calls = Calls(only_dtype(trace.calls))
    threads: dict[Any, list[Call | Launch]] = defaultdict(list)
    for call in trace.calls:
        threads[call.thread].append(call)
    for launch in trace.launches:
        threads[launch.thread].append(launch)
    owners: list[_Owner] = []
    of_launch: dict[int, _Owner | None] = {}
    of_call: dict[int, _Owner] = {}
    for items in threads.values():
        open_calls: list[_Frame] = []
        for item in sorted(items, key=_in_order):
            while open_calls and open_calls[-1].call.end <= item.start:
                open_calls.pop()
            around = open_calls[-1] if open_calls else None
            if isinstance(item, Launch):
                of_launch[item.correlation] = None if around is None else _launching(around, calls, owners)
                continue
            frame = _frame(item, around, calls, owners)
            open_calls.append(frame)
            if frame.owner is not None and item.external >= 0:
                of_call[item.external] = frame.owner
    return owners, of_launch, of_call


def _in_order(item: Call | Launch) -> tuple[float, float]:
    """Sort key: by start, enclosing calls first."""
    return (item.start, -item.end) if isinstance(item, Call) else (item.start, 0.0)


def _frame(call: Call, around: _Frame | None, calls: Calls, owners: list[_Owner]) -> _Frame:
    communicates = call.name.startswith(_COMMUNICATION) or (around is not None and around.communicates)
    backward = call.name.startswith(_BACKWARD) or (around is not None and around.backward)
    owner = around.owner if around is not None else None
    if owner is None and not communicates:
        kernel = calls(call.name, call.arguments)
        if kernel != "inner":
            owner = _Owner(call, None if kernel == "unknown" else kernel, backward)
            owners.append(owner)
    return _Frame(call, owner, communicates, backward)


def _launching(around: _Frame, calls: Calls, owners: list[_Owner]) -> _Owner | None:
    """Return the owner of a launch; a composite operator launches nothing itself, or else it is one kernel here."""
    if around.owner is None and not around.communicates:
        kernel = calls(around.call.name, around.call.arguments, launches=True)
        if kernel != "inner":
            around.owner = _Owner(around.call, None if kernel == "unknown" else kernel, around.backward)
            owners.append(around.owner)
    return around.owner


def only_dtype(calls: Iterable[Call]) -> torch.dtype | None:
    """Return the floating-point dtype of a run; None where it has several."""
    found: set[torch.dtype] = set()
    for call in calls:
        if call.arguments is None:
            continue
        for shape, kind in zip(call.arguments[0], call.arguments[1] or (), strict=False):
            dtype = DTYPES.get(kind) if isinstance(kind, str) else None
            if dtype is None or not dtype.is_floating_point or not all(isinstance(size, int) for size in shape):
                continue
            if math.prod(shape) > _FEW:
                found.add(dtype)
    return found.pop() if len(found) == 1 else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals in order, merged where they touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlaps(one: Interval, others: Sequence[Interval]) -> bool:
    """Whether an interval overlaps one of some sorted, disjoint intervals."""
    after = bisect.bisect_left(others, (one[1], -math.inf))
    return after > 0 and others[after - 1][1] > one[0]


def _gaps(trace: TraceFile, owners: Sequence[_Owner]) -> list[float]:
    """Return the seconds between kernels on the busiest thread, without the time spent waiting for collectives."""
    threads = Counter(owner.call.thread for owner in owners)
    if not threads:
        return []
    main = threads.most_common(1)[0][0]
    waits = merged((call.start, call.end) for call in trace.calls if call.name.startswith(_COMMUNICATION))
    spans = merged((owner.call.start, owner.call.end) for owner in owners if owner.call.thread == main)
    gaps = ((one[1], two[0]) for one, two in itertools.pairwise(spans))
    return [(end - start) * MICROSECONDS for start, end in gaps if not overlaps((start, end), waits)]


def _issue_times(launches: Sequence[Launch], owners: Sequence[_Owner]) -> dict[str, list[float]]:
    """Return the times from the start of one launching operator to that of the next, where the host did not wait."""
    waits: dict[Any, list[float]] = defaultdict(list)
    for launch in launches:
        if any(word in launch.name for word in _WAITS) and not launch.name.endswith("Async"):
            waits[launch.thread].append(launch.start)
    threads: dict[Any, list[_Owner]] = defaultdict(list)
    for owner in owners:
        if owner.launched:
            threads[owner.call.thread].append(owner)
    found: dict[str, list[float]] = {"dispatch": [], "python": []}
    for thread, items in threads.items():
        stops = sorted(waits[thread])
        for one, two in itertools.pairwise(items):
            begin, end = one.call.start, two.call.start
            if one.backward == two.backward and bisect.bisect_left(stops, begin) == bisect.bisect_left(stops, end):
                found["dispatch" if one.backward else "python"].append((end - begin) * MICROSECONDS)
    return found


def _short(name: str) -> str:
    """Return a kernel's name without its template arguments."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:60]
