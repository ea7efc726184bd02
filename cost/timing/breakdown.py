"""Breakdown of the time of a step."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple, TypeVar

from legoai.cost.kernels.work import is_product, kind_of
from legoai.cost.timing.intervals import RESOURCES, Floats, Intervals, SegmentIntervals, exposed_seconds, seconds_busy
from legoai.cost.timing.timeline import COMMUNICATION, Interval, Resource
from legoai.cost.trace.records import Collective, Copy, Kernel, Phase

DEVICE: Final[tuple[Resource, ...]] = ("compute", *COMMUNICATION, "host_to_device", "device_to_host")

_Key = TypeVar("_Key")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Calls of an operator that are recomputed: of all of a step's forward, and seconds of the recomputation."""

    op: str
    calls: int
    of: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """Time of the kernels of equal modules, which the same lines of a plan decide.

    Attributes:
        pattern: their path, with numbers written as `*`.
        first: the path of one of them.
        modules: number of modules.
        seconds: of all their kernels.
        recompute: part of the seconds in recomputation.
        op: the operator with the largest share.
        phase: of the step, in which that operator takes longest.
        recomputed: the operators that are recomputed, longest first.
    """

    pattern: str
    first: str
    modules: int
    seconds: float
    recompute: float
    op: str
    phase: Phase
    recomputed: tuple[Recomputed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Time of the collectives of one kind, on one axis, for equal modules, which the same line of a plan causes.

    Attributes:
        kind: of the collectives.
        axis: the mesh axes that they span.
        ranks: of a group.
        pattern: the modules' path, with numbers written as `*`.
        first: the path of one of them.
        phase: of the step.
        of_parameters: whether they gather parameters or reduce gradients.
        count: number of collectives.
        bytes: of all, as :class:`~legoai.cost.trace.records.Collective` counts them.
        seconds: of all.
        exposed: part of the seconds during which nothing is computed.
    """

    kind: str
    axis: str
    ranks: int
    pattern: str
    first: str
    phase: Phase
    of_parameters: bool
    count: int
    bytes: int
    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A step's seconds on one rank. ``compute``, ``exposed``, ``copies``, ``host`` and ``idle`` add up to ``seconds``.

    Attributes:
        seconds: of the step.
        compute: during which a kernel runs.
        exposed: during which a collective runs and no kernel.
        copies: during which only copies between host and device run.
        host: during which only the host computes, as an offloaded optimizer does.
        idle: during which nothing runs: the host has not issued the next operation yet, or in a pipeline the rank waits
            for others.
        by_kind: of ``compute``: matrix products, attention, and what moves bytes by kind.
        by_phase: of ``compute``.
        recompute: of ``compute``, in recomputation.
        slowed: of ``compute``, slowdown from overlapping communication.
        communication: seconds of all collectives, hidden or not.
        exposed_by_axis: of ``exposed``.
        by_model: seconds of all operations by the model that estimated them.
    """

    seconds: float
    compute: float
    exposed: float
    copies: float
    host: float
    idle: float
    by_kind: Mapping[str, float]
    by_phase: Mapping[Phase, float]
    recompute: float
    slowed: float
    communication: float
    exposed_by_axis: Mapping[str, float]
    by_model: Mapping[str, float]


def breakdown(intervals: Sequence[Interval], seconds: float) -> Breakdown:
    """Compute the breakdown of a step.

    Args:
        intervals: of the step, on one rank.
        seconds: of the step.
    """
    held = Intervals.of(intervals)
    kinds: defaultdict[str, float] = defaultdict(float)
    phases: defaultdict[Phase, float] = defaultdict(float)
    models: defaultdict[str, float] = defaultdict(float)
    compute = slowed = communication = 0.0
    for segment, times in _uses(held):
        for item in segment.intervals:
            once = item.end - item.start
            took = once * times
            models[item.cost.model] += took
            if item.cost.resource == "compute":
                compute += took
                slowed += (once - item.cost.seconds) * times
            if isinstance(item.record, Kernel):
                kinds[_kind(item.record.op)] += took
                phases[item.record.phase] += took
            elif isinstance(item.record, Copy):
                if item.cost.resource == "compute":
                    kinds["copy"] += took
                    phases[item.record.phase] += took
            elif isinstance(item.record, Collective):
                communication += took
    axes: defaultdict[str, float] = defaultdict(float)
    for one in collective_costs(held):
        axes[one.axis or "other"] += one.exposed
    kernels_and_collectives = seconds_busy(held, ("compute", *COMMUNICATION))
    on_device = seconds_busy(held, DEVICE)
    everything = seconds_busy(held, RESOURCES)
    return Breakdown(
        seconds=seconds,
        compute=compute,
        exposed=sum(axes.values()),
        copies=max(0.0, on_device - kernels_and_collectives),
        host=max(0.0, everything - on_device),
        idle=max(0.0, seconds - everything),
        by_kind=_sorted(kinds),
        by_phase=_sorted(phases),
        recompute=phases["recompute"],
        slowed=max(0.0, slowed),
        communication=communication,
        exposed_by_axis=_sorted(axes),
        by_model=_sorted(models),
    )


def _uses(intervals: Intervals) -> Iterator[tuple[SegmentIntervals, int]]:
    """Yield each segment once, with the number of times that it runs."""
    times = Counter(id(segment) for _, segment in intervals.segments)
    yield from (
        (segment, times[id(segment)]) for segment in {id(each): each for _, each in intervals.segments}.values()
    )


def pattern_of(path: str) -> str:
    """Return a module's path with its numbers written as `*`: `layers.3.attention` is `layers.*.attention`."""
    return _pattern(path)


@cache
def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path)


@cache
def _kind(op: str) -> str:
    if is_product(op):
        return "matrix product"
    if "attention" in op and not op.startswith("fused("):
        return "attention"
    return kind_of(op)


def _sorted(seconds: Mapping[_Key, float]) -> dict[_Key, float]:
    return dict(sorted(((k, v) for k, v in seconds.items() if v > 0), key=lambda item: -item[1]))


def module_costs(
    intervals: Sequence[Interval],
    *,
    of_kernels: Callable[[str], Hashable] = lambda _: None,
    of_recomputation: Callable[[str], Hashable] = lambda _: None,
) -> tuple[ModuleCost, ...]:
    """Return the time of the kernels of modules, the most expensive first.

    Args:
        intervals: of a step, on one rank.
        of_kernels: the cause of a module's kernels. Modules with different causes are not equal.
        of_recomputation: the cause of what a module recomputes, in the same way.
    """
    held = Intervals.of(intervals)
    found: defaultdict[str, list[tuple[str, Kernel, float, int]]] = defaultdict(list)
    recomputing = set()
    for segment, times in _uses(held):
        for item in segment.intervals:
            if isinstance(record := item.record, Kernel):
                path = record.module if segment.named else held.path(record.module)
                pattern = pattern_of(path)
                found[pattern].append((path, record, (item.end - item.start) * times, times))
                if record.phase == "recompute":
                    recomputing.add(pattern)
    groups: defaultdict[tuple[str, Hashable], list[tuple[str, Kernel, float, int]]] = defaultdict(list)
    for pattern, kernels in found.items():
        keys: dict[str, tuple[str, Hashable]] = {}
        for kernel in kernels:
            path = kernel[0]
            if path not in keys:
                again = of_recomputation(path) if pattern in recomputing else None
                keys[path] = pattern, (of_kernels(path), again)
            groups[keys[path]].append(kernel)
    costs = (_module(pattern, kernels) for (pattern, _), kernels in groups.items())
    return tuple(sorted(costs, key=lambda item: (-item.seconds, item.pattern)))


def _module(pattern: str, kernels: Sequence[tuple[str, Kernel, float, int]]) -> ModuleCost:
    ops: defaultdict[str, float] = defaultdict(float)
    phases: defaultdict[tuple[str, Phase], float] = defaultdict(float)
    for _, kernel, took, _ in kernels:
        ops[kernel.op] += took
        phases[kernel.op, kernel.phase] += took
    op = max(ops, key=lambda op: ops[op])
    _, phase = max((one for one in phases if one[0] == op), key=lambda one: phases[one])
    return ModuleCost(
        pattern=pattern,
        first=kernels[0][0],
        modules=len({path for path, *_ in kernels}),
        seconds=sum(ops.values()),
        recompute=sum(took for _, kernel, took, _ in kernels if kernel.phase == "recompute"),
        op=op,
        phase=phase,
        recomputed=tuple(_recomputed(kernels)),
    )


def _recomputed(kernels: Sequence[tuple[str, Kernel, float, int]]) -> Iterator[Recomputed]:
    """Yield the operators of equal modules that are recomputed, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[tuple[str, Phase]] = Counter()
    for _, kernel, took, times in kernels:
        calls[kernel.op, kernel.phase] += times
        if kernel.phase == "recompute":
            seconds[kernel.op] += took
    for op, took in sorted(seconds.items(), key=lambda item: (-item[1], item[0])):
        yield Recomputed(op, calls[op, "recompute"], calls[op, "forward"], took)


def collective_costs(
    intervals: Sequence[Interval], cause: Callable[[Collective, str], Hashable] = lambda *_: None
) -> tuple[CollectiveCost, ...]:
    """Return the time of collectives, the most exposed first, then the longest.

    Args:
        intervals: of a step, on one rank.
        cause: of a collective of a module. Those with different causes are not summed.
    """
    held = Intervals.of(intervals)
    alone: dict[int, tuple[SegmentIntervals, int, Floats]] = {}
    for (_, segment), seconds in zip(held.segments, exposed_seconds(held), strict=True):
        _, times, before = alone.get(id(segment), (segment, 0, 0.0))
        alone[id(segment)] = segment, times + 1, before + seconds
    groups: defaultdict[tuple[str, str, int, str, Phase, bool, Hashable], list[_Collective]] = defaultdict(list)
    for segment, times, seconds in alone.values():
        for place, bare in zip(segment.collectives.tolist(), seconds.tolist(), strict=True):
            item = segment.intervals[place]
            record = item.record
            assert isinstance(record, Collective)
            path = record.module if segment.named else held.path(record.module)
            pattern, of_parameters, why = pattern_of(path), record.of_parameters, cause(record, path)
            key = record.kind, record.axis, len(record.ranks), pattern, record.phase, of_parameters, why
            groups[key].append(_Collective(path, record, item.end - item.start, bare, times))
    costs = (
        CollectiveCost(
            kind=kind,
            axis=axis,
            ranks=ranks,
            pattern=pattern,
            first=items[0].path,
            phase=phase,
            of_parameters=of_parameters,
            count=sum(item.times for item in items),
            bytes=sum(item.record.bytes * item.times for item in items),
            seconds=sum(item.seconds * item.times for item in items),
            exposed=sum(item.exposed for item in items),
        )
        for (kind, axis, ranks, pattern, phase, of_parameters, _), items in groups.items()
    )
    return tuple(sorted(costs, key=lambda item: (-item.exposed, -item.seconds, item.pattern)))


class _Collective(NamedTuple):
    """A collective of a segment: seconds of one call, exposed seconds of all, and how often the segment runs."""

    path: str
    record: Collective
    seconds: float
    exposed: float
    times: int
