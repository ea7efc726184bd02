"""Seconds and bytes of a model's blocks for assigning stages: lower bounds, or observed in a simulation.

With the lower bounds of the search, the step time of the best assignment bounds every split. Observed costs come from
the simulation of one split: the seconds of its actions, attributed to the modules at which a stage can begin in
proportion to their kernels, and the bytes at the peak of each rank, by module. Blocks with equal lower bounds are
treated as equal; memory outside blocks is assumed not to depend on the split.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from legoai.cost.kernels.work import is_product
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.search.lower_bounds.activations import between_halves, kept_of_blocks
from legoai.cost.search.lower_bounds.local_kernels import Pass
from legoai.cost.search.lower_bounds.shared_work import PHASES, BlockWork, LayerSeconds
from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.assignment import Block, Moment, StageProblem
from legoai.cost.search.stages.buffers import sent_and_received
from legoai.cost.timing.intervals import Intervals, SegmentIntervals
from legoai.cost.timing.pace import issued
from legoai.cost.trace.marks import ACTION, END_ACTION
from legoai.cost.trace.records import Kernel, Mark, Phase
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.magnitudes.state import (
    state_of_modules,
    summed_gradients_of_modules,
    unsharded_parameters_of_modules,
)
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import (
    split_points,
    splits_backward,
    stage_count,
    stage_of,
    stages_of_ranks,
)
from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.specs.models.manifests.manifest import Manifest

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate, RankEstimate

_ACTION: Final = re.compile(r"(\d+[FBIW])\d+")

_Slot: TypeAlias = int
"""Index of a block; -1 for the modules before the first, and the number of blocks for those after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Observed seconds and bytes of the stages of a pipeline in a step; empty for a plan without one.

    Attributes:
        actions: median seconds of a stage's actions, by stage and kind: `3F`; at the host's pace on a rank whose host
            takes longer to issue its actions than its device to run them.
        forward: seconds of forward kernels, by the module at which a stage can begin.
        backward: seconds of the kernels of backward and recomputation, by the same modules.
        least: seconds per micro batch under any split, by the same modules: the layers alone on their stream.
        held: bytes at the peak of a rank's memory, by the same modules.
        active: peak of active bytes of each rank.
        beyond: further bytes that each rank uses of its device.
        unused: bytes among these that the allocator reserves.
    """

    actions: Mapping[str, float] = field(default_factory=dict)
    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, BlockWork] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    active: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)

    @staticmethod
    def read(document: Mapping[str, Any]) -> StageWork:
        """The work from plain data, the inverse of `dataclasses.asdict`."""
        least = {start: BlockWork(*took) for start, took in document["least"].items()}
        return StageWork(**{**document, "least": least})


class Room(NamedTuple):
    """Memory limits of a rank, in bytes: of device memory, of active memory, and of reserved memory."""

    device: float
    active: float
    reserved: float


def least_problem(
    analysis: Analysis, least: Mapping[str, Pass], recomputed: Mapping[str, float], room: float
) -> StageProblem | None:
    """The assignment of a plan's blocks at their least costs; None where no stages are possible.

    Args:
        analysis: analysis of a plan in which at most the split is open.
        least: least seconds of layers per micro batch.
        recomputed: seconds of recomputation, by the recomputing module.
        room: limit of a rank's active memory, in bytes.

    Raises:
        Undecided: the costs depend on another hole.
    """
    count, batches, ranks = stage_count(analysis), micro_batches(analysis.plan), stages_of_ranks(analysis)
    known = split_points(analysis)
    if count is None or batches is None or not ranks or not 1 < count <= len(known.blocks):
        return None
    graph = graph_of(analysis)
    if graph is None or graph.stages != count:
        return None
    slots = _slots(known)
    forward = _by_slot(known, slots, ((path, took.forward) for path, took in least.items()))
    backward = _by_slot(known, slots, [*((path, took.backward) for path, took in least.items()), *recomputed.items()])
    state = _by_slot(known, slots, state_of_modules(analysis).items())
    kept = _by_slot(known, slots, kept_of_blocks(analysis).items())
    gradients = _by_slot(known, slots, summed_gradients_of_modules(analysis).items())
    gathered = _by_slot(known, slots, unsharded_parameters_of_modules(analysis).items())
    # The seconds of each half of a split backward have no bound but 0; only their sum has.
    halves = splits_backward(analysis)
    apart = halves and not is_traced(analysis)
    halved = _by_slot(known, slots, between_halves(analysis).items() if apart else ())

    def block(slot: _Slot) -> Block:
        f, b = forward[slot], backward[slot]
        seconds = {"F": f, "B": b, "I": 0.0, "W": 0.0} if halves else {"F": f, "B": b}
        return Block(seconds, f + b, state[slot], kept[slot], gradients[slot], gathered[slot], halved[slot])

    return StageProblem(
        blocks=[block(slot) for slot in range(len(known.blocks))],
        first=block(-1),
        last=block(len(known.blocks)),
        ranks=ranks,
        moments=[
            [
                Moment(
                    held.kept(between_halves=apart),
                    room,
                    held.summed,
                    held.gathered,
                    sent_and_received(analysis, stages, held, between_halves=apart),
                    held.with_gradients,
                )
                for held in moments
            ]
            for stages, moments in zip(ranks, graph.held, strict=True)
        ],
        graph=graph,
        micro_batches=batches,
    )


def observed_problem(problem: StageProblem, analysis: Analysis, work: StageWork, room: Room) -> StageProblem | None:
    """The same assignment at the costs observed for one split; None where the observation is incomplete.

    Args:
        problem: the assignment at least costs.
        analysis: analysis of the plan whose split was simulated.
        work: observed work of its stages.
        room: memory limits of a rank.
    """
    known = split_points(analysis)
    stages = {path: stage_of(analysis, path) for path in known.starts}
    kernels = {"F": work.forward, "B": work.backward, "I": work.backward, "W": work.backward}
    of_stage = {
        kind: _added((stages[path], took) for path, took in kernels[kind].items() if path in stages) for kind in kernels
    }
    seconds: dict[str, dict[str, float]] = {
        path: {
            kind: work.actions[f"{stage}{kind}"] * kernels[kind].get(path, 0.0) / of_stage[kind][stage]
            for kind in kernels
            if f"{stage}{kind}" in work.actions and of_stage[kind].get(stage)
        }
        for path, stage in stages.items()
    }
    if len(work.active) != len(problem.ranks) or not all(seconds[path] for path in known.blocks):
        return None
    slots = _slots(known)
    by_kind = {
        kind: _by_slot(known, slots, ((path, found.get(kind, 0.0)) for path, found in seconds.items()))
        for kind in kernels
    }

    def block(members: Sequence[_Slot], kept: float) -> Block:
        mean = {kind: sum(by_kind[kind][slot] for slot in members) / len(members) for kind in kernels}
        return Block(mean, 0.0, 0.0, kept)

    # `Moment.held` has the bytes kept by a block: they depend on micro batches in flight, and are observed by stage.
    observed = {slot: block(members, 1.0) for _, members in _equal_blocks(problem.blocks) for slot in members}
    held = _added((stages[path], work.held.get(path, 0)) for path in known.blocks)
    counts = Counter(stages[path] for path in known.blocks)
    moments = []
    for rank, own in enumerate(problem.ranks):
        limit = min(room.active, room.reserved - work.unused[rank], room.device - work.beyond[rank])
        besides = work.active[rank] - sum(held[stage] for stage in own)
        moments.append([Moment({stage: held[stage] / counts[stage] for stage in own}, limit - besides)])
    return StageProblem(
        blocks=[observed[slot] for slot in range(len(known.blocks))],
        first=block([-1], 0.0),
        last=block([len(known.blocks)], 0.0),
        ranks=problem.ranks,
        moments=moments,
        graph=problem.graph,
        micro_batches=problem.micro_batches,
    )


def raised_problem(
    problem: StageProblem, analysis: Analysis, work: Mapping[str, BlockWork], recomputed: Mapping[str, float]
) -> StageProblem:
    """The assignment at least costs, with the seconds of blocks raised to those of simulated blocks.

    The seconds of a block per micro batch do not depend on its stage.

    Args:
        problem: the assignment at least costs.
        analysis: analysis of the plan.
        work: simulated work of its blocks, by the modules at which a stage can begin.
        recomputed: least seconds of recomputation, by the recomputing module.
    """
    known = split_points(analysis)
    slots, halves = _slots(known), splits_backward(analysis)
    again = _by_slot(known, slots, recomputed.items())
    forward = _by_slot(known, slots, ((start, took.forward) for start, took in work.items()))
    backward = _by_slot(
        known, slots, ((start, took.backward + (took.recomputed or 0.0)) for start, took in work.items())
    )
    if any(took.recomputed is None for took in work.values()):
        backward = {slot: took + again[slot] for slot, took in backward.items()}

    def raised(block: Block, members: Iterable[_Slot]) -> Block:
        f = max(block.seconds["F"], min(forward[slot] for slot in members))
        b = max(block.seconds["B"], min(backward[slot] for slot in members))
        seconds = {"F": f, "B": b, "I": 0.0, "W": 0.0} if halves else {"F": f, "B": b}
        return replace(block, seconds=seconds, whole=f + b)

    by_block = {slot: raised(block, members) for block, members in _equal_blocks(problem.blocks) for slot in members}
    return replace(
        problem,
        blocks=[by_block[slot] for slot in range(len(problem.blocks))],
        first=raised(problem.first, [-1]),
        last=raised(problem.last, [len(problem.blocks)]),
    )


def _equal_blocks(blocks: Sequence[Block]) -> list[tuple[Block, list[_Slot]]]:
    """Groups of equal blocks: one block, and the slots of all of them."""
    found: list[tuple[Block, list[_Slot]]] = []
    for slot, block in enumerate(blocks):
        members = next((members for other, members in found if other == block), None)
        if members is None:
            found.append((block, [slot]))
        else:
            members.append(slot)
    return found


def blocks_of_stages(analysis: Analysis) -> tuple[int, ...]:
    """The number of blocks of each stage of a plan whose split is decided."""
    counts = Counter(stage_of(analysis, path) for path in split_points(analysis).blocks)
    return tuple(counts[stage] for stage in range(stage_count(analysis) or 0))


def work_of_stages(found: Estimate, manifest: Manifest) -> StageWork:
    """Observed work of the stages of a simulated plan; empty without a pipeline."""
    if not found.ranks[0].actions:
        return StageWork()
    known = SplitPoints(manifest)
    actions: defaultdict[str, list[float]] = defaultdict(list)
    kernels = _Kernels(known)
    costs = OpCosts(machine=found.machine)
    least = _Least(known, costs)
    held: Counter[str] = Counter()
    for rank in found.ranks:
        slower = _slower_host(rank, costs)
        for action in rank.actions:
            name = _ACTION.fullmatch(action.name)
            if name is not None:
                actions[name[1]].append((action.end - action.start) * slower)
        kernels.add(rank)
        least.add(rank)
        for path, size in rank.memory.by_module.items():
            start = known.holder(path)
            if start is not None:
                held[start] += size
    return StageWork(
        actions={name: statistics.median(taken) for name, taken in actions.items()},
        forward=dict(kernels.forward),
        backward=dict(kernels.backward),
        least=least.work(max(map(len, actions.values()))),
        held=dict(held),
        active=[rank.memory.peak for rank in found.ranks],
        beyond=[rank.use.total - rank.memory.peak for rank in found.ranks],
        unused=[rank.use.reserved - rank.memory.peak for rank in found.ranks],
    )


def _slower_host(rank: RankEstimate, costs: OpCosts) -> float:
    """Seconds in which a host issues a rank's actions, divided by those that its device takes for them; at least 1.

    A rank that waits for a slower one shows only its device's pace. Its host's counts as soon as that one is faster.
    """
    items = rank.trace.between(rank.span)
    marks = [
        place
        for place, item in enumerate(items)
        if isinstance(item, Mark) and item.name.startswith((ACTION, END_ACTION))
    ]
    seconds = issued(items[marks[0] : marks[-1]], cost=costs, host=costs.machine.host()).seconds[-1]
    return max(1.0, seconds / sum(action.end - action.start for action in rank.actions))


_Sums: TypeAlias = "defaultdict[str, float]"


@dataclass(slots=True)
class _Kernels:
    """Seconds of kernels of a step, by the module at which a stage can begin; as in :class:`StageWork`."""

    known: SplitPoints
    forward: _Sums = field(default_factory=lambda: defaultdict(float))
    backward: _Sums = field(default_factory=lambda: defaultdict(float))

    def add(self, rank: RankEstimate) -> None:
        """Add the kernels of a rank."""
        whole = Intervals.of(rank.intervals)
        sums: dict[int, dict[tuple[str, bool], float]] = {}
        for _, segment in whole.segments:
            if id(segment) not in sums:
                sums[id(segment)] = self._of_segment(segment, whole)
            for (start, forward), taken in sums[id(segment)].items():
                (self.forward if forward else self.backward)[start] += taken

    def _of_segment(self, segment: SegmentIntervals, whole: Intervals) -> dict[tuple[str, bool], float]:
        found: defaultdict[tuple[str, bool], float] = defaultdict(float)
        for item in segment.intervals:
            record = item.record
            if not isinstance(record, Kernel) or record.phase not in ("forward", "backward", "recompute"):
                continue
            start = self.known.holder(record.module if segment.named else whole.path(record.module))
            if start is not None:
                found[start, record.phase == "forward"] += item.end - item.start
        return found


@dataclass(slots=True)
class _Least:
    """Seconds per step under any split, by phase and by the module at which a stage can begin."""

    known: SplitPoints
    cost: OpCosts
    sums: dict[Phase, _Sums] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    def add(self, rank: RankEstimate) -> None:
        """Add the layers of a rank."""
        trace = rank.trace
        products = (item for item in trace.once_each() if isinstance(item, Kernel) and is_product(item.op))
        stream = next((item.stream for item in products), 0)
        seconds: LayerSeconds[tuple[str, Phase]] = LayerSeconds(
            self.cost, stream, lambda record: (record.module, record.phase)
        )
        found: defaultdict[tuple[str, Phase], float] = defaultdict(float)
        for item in trace.between(rank.span):
            for key, took in seconds.of(item).items():
                found[key] += took
        for (path, phase), took in found.items():
            start = self.known.holder(path if trace.translation is None else trace.translation.path(path))
            if start is not None:
                self.sums[phase][start] += took

    def work(self, micro_batches: int) -> dict[str, BlockWork]:
        """Seconds per micro batch."""
        forward, backward, again = (self.sums[phase] for phase in PHASES)
        return {
            start: BlockWork(*(sums[start] / micro_batches for sums in (forward, backward, again)))
            for start in sorted({*forward, *backward, *again})
        }


def _added(pairs: Iterable[tuple[int | None, float]]) -> dict[int | None, float]:
    found: defaultdict[int | None, float] = defaultdict(float)
    for key, value in pairs:
        found[key] += value
    return found


def _slots(known: SplitPoints) -> dict[str, _Slot]:
    """Slot of each module at which a stage can begin; modules between two blocks belong to the first of them."""
    inside, found, slot = set(known.blocks), {}, -1
    last = known.blocks[-1]
    ended = False
    for path in known.starts:
        if path in inside:
            slot += 1
        elif ended:
            slot = len(known.blocks)
        found[path] = slot
        ended = ended or path == last
    return found


def _by_slot(known: SplitPoints, slots: Mapping[str, _Slot], values: Iterable[tuple[str, float]]) -> dict[_Slot, float]:
    found = dict.fromkeys(range(-1, len(known.blocks) + 1), 0.0)
    for path, value in values:
        start = known.holder(path)
        if start is not None:
            found[slots[start]] += value
    return found
