"""Bucket problem of a simulated candidate: seconds, bytes and collectives of each of its units.

The computation of a unit does not depend on its bucket, nor do the bytes of its collectives. The memory limit for
buckets while a unit computes is the memory that was left then in the simulation, plus the bytes of the simulated
buckets.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from legoai.cost.kernels.work import is_product, kind_of
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.collective_time import seconds_on, slowest_placement
from legoai.cost.network.topology import Placement
from legoai.cost.search.buckets.problem import BucketProblem, Neighbour, Seconds, Unit, Work
from legoai.cost.timing.timeline import Cost, Host, Interval
from legoai.cost.trace.records import LOSS, Allocate, Collective, CollectiveKind, Free, Kernel, Resize
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.communication.comm import bucket_rules, buckets_of, reduces_last, unit_kinds
from legoai.dsl.analysis.facts import below, holders
from legoai.dsl.analysis.parallelism.buckets import local_numel
from legoai.dsl.analysis.parallelism.graph import is_traced, reorders
from legoai.specs.allocator import round_block
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.mesh import DATA_AXES
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate, RankEstimate

_HEAD: Final = ""
"""Key of the computation before the first unit."""
_TAIL: Final = LOSS
"""Key of the computation after the last unit."""
_MOVES: Final = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """Observed work of the units of a simulated plan in a step, by their paths; empty for a plan without buckets.

    Attributes:
        works: distinct computations of units per micro batch: first the copies of parameters, then the kernels, each as
            intervals of (seconds alone, seconds when overlapped by a collective).
        forward: index in `works` of each unit's forward.
        backward: index in `works` of each unit's backward with recomputation.
        forward_active: peak of active bytes while a unit computes in forward.
        backward_active: peak of active bytes while a unit computes in backward.
        traffic: bytes of collectives by kind, phase and placement, and then by the first unit of their bucket.
        active: peak of active bytes.
        beyond: further bytes that the rank uses of its device.
        unused: bytes among these that the allocator reserves.
    """

    works: Sequence[Sequence[Sequence[float]]] = field(default_factory=list)
    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    forward_active: Mapping[str, int] = field(default_factory=dict)
    backward_active: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    active: int = 0
    beyond: int = 0
    unused: int = 0


class _Flow(NamedTuple):
    """Collectives of one kind in one phase on one placement, as in the keys of :attr:`UnitWork.traffic`."""

    kind: CollectiveKind
    phase: str
    on: Placement

    def key(self) -> str:
        return f"{self.kind} {self.phase} {self.on.ranks} {self.on.hosts} {self.on.per_host} {self.on.short}"

    @staticmethod
    def read(key: str) -> _Flow:
        kind, phase, *sizes = key.split()
        return _Flow(kind, phase, Placement(*map(int, sizes)))  # type: ignore[arg-type]


def work_of_units(found: Estimate, analysis: Analysis) -> UnitWork:
    """Observed work of the units of a simulated plan; empty without rules of `comm`, or with a pipeline."""
    if not bucket_rules(analysis) or len(found.ranks) > 1:
        return UnitWork()
    [rank] = found.ranks
    holder = functools.cache(_holder(analysis))
    kernels: dict[bool, defaultdict[str, list[Interval]]] = {True: defaultdict(list), False: defaultdict(list)}
    traffic: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    products = (item for item in rank.trace.once_each() if isinstance(item, Kernel) and is_product(item.op))
    stream = next((item.stream for item in products), 0)
    for interval in rank.intervals:
        record = interval.record
        if record.phase not in ("forward", "backward", "recompute"):
            continue
        if isinstance(record, Collective) and _moves_parameters(record):
            machine = found.machine
            on = slowest_placement(record, machine.network, machine.profile, machine.world)
            traffic[_Flow(record.kind, record.phase, on).key()][holder(record.module)] += record.bytes
        elif isinstance(record, Kernel | Collective) and record.stream == stream:
            kernels[record.phase == "forward"][holder(record.module)].append(interval)
    active = _active(rank, holder)
    works: list[list[list[float]]] = []
    slowed, batches = _slowed(rank, found.machine.host()), micro_batches(analysis.plan) or 1
    forward, backward = (
        {path: _index_in(works, _intervals(items, slowed, batches)) for path, items in kernels[phase].items()}
        for phase in (True, False)
    )
    return UnitWork(
        works=works,
        forward=forward,
        backward=backward,
        forward_active={path: most for (path, forward), most in active.items() if forward},
        backward_active={path: most for (path, forward), most in active.items() if not forward},
        traffic={key: dict(flow) for key, flow in traffic.items()},
        active=rank.memory.peak,
        beyond=rank.use.total - rank.memory.peak,
        unused=rank.use.reserved - rank.memory.peak,
    )


def problems_of(
    analysis: Analysis, work: UnitWork, machine: Machine, limit: float
) -> Iterator[tuple[Span, BucketProblem]]:
    """Yield the bucket problem of each rule of `comm`, with the rule's span.

    Args:
        analysis: analysis of a simulated plan.
        work: observed work of its units.
        machine: the machine that it runs on.
        limit: limit of the rank's active memory, in bytes.
    """
    batches, kinds = micro_batches(analysis.plan), unit_kinds(analysis)
    if not work.forward or batches is None or (reduces_last(analysis) and batches > 1):
        return  # reductions of several sizes
    chain = [path for path in kinds if path and not any(below(other, path) for other in kinds)]
    for rule, paths in bucket_rules(analysis):
        same = all(path in kinds and kinds[path] == kinds[paths[0]] for path in paths)
        first = chain.index(paths[0]) if paths[0] in chain else -1
        if not same or kinds[paths[0]].reshard == "never" or chain[first : first + len(paths)] != paths:
            continue
        assert rule.origin.span is not None
        before = chain[first - 1] if first else _HEAD
        after = chain[first + len(paths)] if first + len(paths) < len(chain) else _TAIL
        yield rule.origin.span, _problem(_Observed(analysis, work, machine, batches, limit), rule, paths, before, after)


class _Observed(NamedTuple):
    """A simulated plan, the observed work of its units, and the limit of its rank's active memory in bytes."""

    analysis: Analysis
    work: UnitWork
    machine: Machine
    batches: int
    limit: float

    def forward(self, path: str) -> Work:
        return self._computed(self.work.forward.get(path))

    def backward(self, path: str) -> Work:
        return self._computed(self.work.backward.get(path))

    def _computed(self, place: int | None) -> Work:
        if place is None:
            return Work()
        copies, *kernels = ((alone, beside) for alone, beside in self.work.works[place])
        return Work(copies, tuple(kernels))

    def left(self, path: str) -> tuple[float, float]:
        """Bytes below the limit while a unit computes, in forward and in backward."""
        found = self.work.forward_active.get(path, 0), self.work.backward_active.get(path, 0)
        return self.limit - found[0], self.limit - found[1]

    def collectives(self, paths: Sequence[str], kinds: Sequence[str], phase: str) -> Seconds:
        """Seconds of collectives as a function of parameters, with the observed bytes per parameter of these units."""
        numel = sum(local_numel(self.analysis, path) for path in paths)
        flows = [
            (flow, sum(size for path, size in by_unit.items() if path in paths) / numel / self.batches)
            for key, by_unit in self.work.traffic.items()
            if (flow := _Flow.read(key)).kind in kinds and (flow.phase == "forward") is (phase == "forward")
        ]
        network, profile = self.machine.network, self.machine.profile

        def seconds(size: int) -> float:
            return sum(
                seconds_on(flow.on, flow.kind, per_parameter * size, network, profile)[0]
                for flow, per_parameter in flows
                if per_parameter
            )

        return functools.cache(seconds)

    def neighbour(self, path: str) -> Neighbour:
        """The neighbour of the units in a problem; outside units it has no collectives."""
        left = self.left(path)
        if path in (_HEAD, _TAIL):
            return Neighbour(self.forward(path), self.backward(path), 0.0, 0.0, 0.0, *left)
        size = local_numel(self.analysis, path)
        gather, again, reduce = (
            self.collectives([path], kinds, phase)(size)
            for kinds, phase in (
                (("all_gather",), "forward"),
                (("all_gather",), "backward"),
                (("reduce_scatter", "all_reduce"), "backward"),
            )
        )
        return Neighbour(self.forward(path), self.backward(path), gather, again, reduce, *left)


def _problem(observed: _Observed, rule: PathRule[Any], paths: list[str], before: str, after: str) -> BucketProblem:
    analysis = observed.analysis
    precision = analysis.plan.precision
    simulated = buckets_of(analysis, rule, paths)
    sizes = {path: local_numel(analysis, path) for path in paths}
    bare = BucketProblem(
        units=[Unit(observed.forward(path), observed.backward(path), sizes[path]) for path in paths],
        before=observed.neighbour(before),
        after=observed.neighbour(after),
        gather=observed.collectives(paths, ("all_gather",), "forward"),
        gather_again=observed.collectives(paths, ("all_gather",), "backward"),
        reduce=observed.collectives(paths, ("reduce_scatter", "all_reduce"), "backward"),
        gathered_bytes=DTYPE_BYTES[precision.param],
        reduced_bytes=DTYPE_BYTES[precision.reduce or precision.param],
        overlaps=not is_traced(analysis) or reorders(analysis),
    )
    return _with_room(bare, observed, paths, [len(bucket) for bucket in simulated])


def _with_room(
    problem: BucketProblem, observed: _Observed, paths: Sequence[str], counts: Sequence[int]
) -> BucketProblem:
    """The problem with the memory limit at each unit: the bytes left in the simulation plus those of its buckets."""
    spans = problem.spans(counts)
    units, place = [], 0
    for index, (span, count) in enumerate(zip(spans, counts, strict=True)):
        previous = spans[index - 1].size if index else 0
        following = spans[index + 1].size if index + 1 < len(spans) else 0
        taken = problem.bytes(span.size, previous, following)
        for unit, path in zip(problem.units[place : place + count], paths[place : place + count], strict=True):
            left = observed.left(path)
            units.append(replace(unit, forward_room=left[0] + taken[0], backward_room=left[1] + taken[1]))
        place += count
    before, after = problem.before, problem.after
    if problem.overlaps:
        gathered, reduced = problem.gathered_bytes * spans[0].size, problem.reduced_bytes * spans[0].size
        before = replace(
            before, forward_room=before.forward_room + gathered, backward_room=before.backward_room + reduced
        )
        after = replace(after, backward_room=after.backward_room + problem.gathered_bytes * spans[-1].size)
    return replace(problem, units=units, before=before, after=after)


def _moves_parameters(record: Collective) -> bool:
    """Whether a collective all-gathers parameters or reduces gradients."""
    return record.kind in _MOVES and any(axis in DATA_AXES for axis in record.axis.split("+"))


def _holder(analysis: Analysis) -> Callable[[str], str]:
    """Function from a module to its unit; modules of the root unit belong to the head or the tail."""
    units = [path for path in unit_kinds(analysis) if path]
    assert analysis.manifest is not None
    place = {path: index for index, path in enumerate(analysis.manifest.modules)}
    first = min((place[path] for path in units), default=0)

    def holder(module: str) -> str:
        if module in units:
            return module
        around = next((above for above in holders(module) if above in units), None)
        if around is not None:
            return around
        return _HEAD if place.get(module, math.inf) < first else _TAIL

    return holder


def _slowed(rank: RankEstimate, host: Host) -> Callable[[Cost], float]:
    """Function from a kernel's cost to its slowdown when overlapped by the longest collective."""
    moves = (item.cost for item in rank.intervals if isinstance(item.record, Collective))
    longest = max(moves, key=lambda cost: cost.seconds, default=None)
    return lambda cost: 1.0 if longest is None else host.slowdown(cost, [longest])


def _intervals(items: Sequence[Interval], slowed: Callable[[Cost], float], batches: int) -> list[list[float]]:
    """Computation of one of equal micro batches: its leading copies, and then intervals with one slowdown each."""
    found = [[0.0, 0.0]]
    copies, last = True, 0.0
    for item in items[: -(-len(items) // batches)]:
        is_kernel = isinstance(item.record, Kernel)
        copies = copies and is_kernel and kind_of(item.record.op) == "copy"  # type: ignore[union-attr]
        slowdown = slowed(item.cost) if is_kernel else 1.0
        if not copies and (len(found) == 1 or slowdown != last):
            found.append([0.0, 0.0])
            last = slowdown
        found[-1][0] += item.cost.seconds
        found[-1][1] += item.cost.seconds * slowdown
    return found


def _index_in(works: list[list[list[float]]], intervals: list[list[float]]) -> int:
    """Index of a computation in `works`, to which it is added if it is new."""
    if intervals not in works:
        works.append(intervals)
    return works.index(intervals)


def _active(rank: RankEstimate, holder: Callable[[str], str]) -> dict[tuple[str, bool], int]:
    """Peak of active bytes while each unit computes, by unit and by whether in forward."""
    sizes: dict[int, int] = {}
    found: dict[tuple[str, bool], int] = {}
    active, computing = 0, None
    for index, record in enumerate(rank.trace.records):
        if index >= rank.span.stop:
            break
        if isinstance(record, Allocate):
            sizes[record.storage] = size = round_block(record.bytes)
            active += size
        elif isinstance(record, Free):
            active -= sizes.pop(record.storage)
        elif isinstance(record, Resize):
            size = round_block(record.bytes)
            active += size - sizes[record.storage]
            sizes[record.storage] = size
        elif isinstance(record, Kernel) and index >= rank.span.start:
            inside = record.phase in ("forward", "backward", "recompute")
            computing = (holder(record.module), record.phase == "forward") if inside else None
        if computing is not None:
            found[computing] = max(found.get(computing, 0), active)
    return found
