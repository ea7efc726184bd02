"""Lower bounds of a candidate's step time and memory that need no simulation.

Each is admissible: no simulation of the candidate, nor of any plan that the holes left in it may become, gives less.
Where a bound depends on a hole, that part of it is 0, but for recomputation and gathers that memory forces whatever the
hole is, and for a pipeline's schedule, of all of which the least counts (:mod:`legoai.cost.search.stages.bounds`).

Time. Kernels of one rank run one after another, and no product is faster than the fastest rate that its profile can
give (:func:`legoai.cost.search.least_costs.layers.fastest_rate`). All ranks together do at least the products that the
model asks for: of each linear layer one in forward and two in backward for each token, attention's once in forward and
twice in backward, and once more what is recomputed. A rank does at least its share of its stages' products, since what
is not sharded is done by each rank again. Where mesh and micro batch are decided, a layer takes no less than at the
fastest of the shapes that it may have on a rank (:mod:`legoai.cost.search.least_costs.local_kernels`), with what it
waits for on `tp` (:mod:`legoai.cost.search.least_costs.model_layers`); where styles on `tp` are open, each block with
what the best choice of them adds (:mod:`legoai.cost.search.least_costs.open_styles`); what is gathered or reduced is
copied by the stream that computes; and parameters are gathered over the same links one after another, which slows what
computes beside them (:mod:`legoai.cost.search.least_costs.collectives`), but where nothing does
(:mod:`legoai.cost.search.least_costs.exposed`); and between reductions gradients are added up
(:mod:`legoai.cost.search.least_costs.gradients`). All layers take no less than those of a candidate that
was simulated and has the same (:mod:`legoai.cost.search.least_costs.shared_work`), nor blocks than those of one that
has the same blocks (:mod:`legoai.cost.search.least_costs.seen_blocks`), with what communication beside them adds
(:mod:`legoai.cost.search.delays`). In a pipeline a rank begins when the
first micro batch has passed the stages before its own, and the step ends when the last has gone back through them.
What finds no room in memory is computed again (:mod:`legoai.cost.search.forced`), as open treatments allow it
(:mod:`legoai.cost.search.least_costs.treatments`).
Where only the split into stages is open, no split is faster than the assignment that is best at these costs
(:mod:`legoai.cost.search.stages.assignment`).

Memory. Parameters, gradients and optimizer state in shards (:func:`legoai.dsl.analysis.state.state_bytes`); or
parameters and optimizer state with what stays gathered, what the blocks keep
(:mod:`legoai.cost.search.least_costs.activations`), and the logits when the backward of a micro batch begins, or all
that is read when that of a block's feed-forward module does, with what units hold then
(:mod:`legoai.cost.search.least_costs.units_in_backward`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from legoai.cost.machine.cluster import Machine, machine_of
from legoai.cost.search.besides import BesidesLayers
from legoai.cost.search.delays import Delays
from legoai.cost.search.forced import Forced
from legoai.cost.search.least_costs.local_kernels import Pass
from legoai.cost.search.least_costs.model_layers import FACTORS, ModelLayers
from legoai.cost.search.least_costs.movements import Moved
from legoai.cost.search.least_costs.recomputation import blocks_moved_again, by_treatments
from legoai.cost.search.least_costs.seen_blocks import treatments_of_blocks
from legoai.cost.search.least_costs.settled_blocks import SettledBlocks
from legoai.cost.search.least_costs.shared_work import BlockWork, MicroBatchWork, SharedWork
from legoai.cost.search.least_memory import least_memory
from legoai.cost.search.memory.points import MemoryPoints
from legoai.cost.search.room import for_tensors, room_of
from legoai.cost.search.stages.assignment import Assignment, StageProblem
from legoai.cost.search.stages.block_bytes import BlockBytes
from legoai.cost.search.stages.bounds import UnderSchedules, along_schedule, under_any_schedule
from legoai.cost.search.stages.costs import (
    Room,
    StageWork,
    blocks_of_stages,
    learnt_problem,
    least_problem,
    raised_problem,
)
from legoai.cost.search.stages.stage_times import StageTimes
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.pipeline import is_staged
from legoai.runtime.linear_program import installed
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.pipeline import OrderFile

T = TypeVar("T")

ASSIGNED_GAP: Final = 1e-3
"""Share of the time by which an assignment of stages may be above the best: far less than what a simulation adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """No simulation gives less: seconds of a step, and bytes of active memory on the fullest rank."""

    step_time: float = 0.0
    memory: float = 0.0


@dataclass(slots=True)
class BoundsOf:
    """Bounds of the candidates of one plan.

    Args:
        profile: of other devices than the plan's.

    Attributes:
        enough: seconds from which on it does not matter how many more they are: some candidate takes these.
        shared: what is known from candidates that were simulated.
        layers: least seconds of layers.
        stages: least seconds of stages.
        forced: least recomputation.
        besides: least seconds beside layers.
        delays: least seconds by which blocks are delayed.
    """

    profile: str | None = None
    enough: float = math.inf
    shared: SharedWork = field(default_factory=SharedWork)
    layers: ModelLayers = field(init=False)
    stages: StageTimes = field(init=False)
    forced: Forced = field(init=False)
    besides: BesidesLayers = field(init=False)
    delays: Delays = field(init=False)
    _machines: dict[str, Machine] = field(default_factory=dict)
    _assignments: dict[tuple[str, Room], Assignment | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Layers are bounded on this machine."""
        self.layers = ModelLayers(self.machine, SettledBlocks(self.machine, self.for_tensors))
        self.stages = StageTimes(self.layers, self._again)
        self.besides = BesidesLayers(self.layers, self.for_tensors)
        self.delays = Delays(self.layers, self.besides)
        self.forced = Forced(self.layers, self.for_tensors, self.delays.of)

    @property
    def known(self) -> object:
        """What has been learnt of all candidates: while it is the same, bounds of open ones are too."""
        return self.layers.own, self.layers.seen.lessons

    def machine(self, analysis: Analysis) -> Machine:
        """The machine of a candidate whose cluster is decided.

        Raises:
            Undecided: the cluster is a hole.
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        use = analysis.plan.cluster
        key = f"{use.device} {use.profile} {use.hosts} {use.devices} {use.fabric}"
        if key not in self._machines:
            self._machines[key] = machine_of(use, 1, directory=analysis.directory, override=self.profile)
        return self._machines[key]

    def __call__(self, analysis: Analysis) -> Bounds:
        """The bounds of a candidate, which may have holes.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        try:
            seconds = self._seconds(analysis)
        except Undecided:
            seconds = 0.0
        return Bounds(
            step_time=max(seconds, self.shared.seconds(analysis, 0.0)),
            # Where no split fits, nothing does.
            memory=self._memory(analysis) if math.isfinite(seconds) else math.inf,
        )

    def learn(self, analysis: Analysis, work: MicroBatchWork, moved: Sequence[Moved], points: MemoryPoints) -> None:
        """Note what a simulated candidate tells of others: what a micro batch took, and what its blocks moved."""
        self.shared.learn(analysis, work)
        self.layers.learn(analysis, moved, work, points.released if points.blocks else 0.0)

    def lessons(self, analysis: Analysis) -> list[str]:
        """What simulating a candidate would tell of others; nothing of what is known."""
        of_blocks = self.layers.seen.lesson(analysis) if analysis.plan.pipeline is None else None
        return [one for one in (of_blocks, self.shared.lesson(analysis)) if one is not None]

    def _memory(self, analysis: Analysis) -> float:
        kept = sum(self.layers.once(analysis, self._kept).values())
        least: float = least_memory(analysis, self.shared.activations(analysis), kept)
        with contextlib.suppress(Undecided):
            if is_staged(analysis):
                least = max(least, self.layers.once(analysis, self._under_any_schedule).bytes)
        pipeline = analysis.plan.pipeline
        if pipeline is None or isinstance(pipeline.split, Hole):
            return least
        try:
            problem = self.stage_problem(analysis)
            return least if problem is None else max(least, problem.memory(blocks_of_stages(analysis)))
        except Undecided:
            return least

    def _kept(self, analysis: Analysis) -> dict[str, float]:
        """Bytes that blocks were seen to keep for one micro batch; none of those that are not decided."""
        try:
            return self.layers.seen.kept(analysis)
        except Undecided:
            return {}

    def _seconds(self, analysis: Analysis) -> float:
        everything = self.layers.once(analysis, self._of_all_ranks)
        try:
            return max(everything, self._on_rank(analysis)) if 0.0 < everything < self.enough else everything
        except Undecided:
            return everything

    def _of_all_ranks(self, analysis: Analysis) -> float:
        """Seconds of a step on a rank, if all share the work of the model, at the fastest rates."""
        plan, of_token = analysis.plan, self.layers.once(analysis, self.layers.of_token)
        if not of_token:
            return 0.0
        tokens = plan.batch.global_batch * plan.batch.length
        return self.layers.once(analysis, self._of_token) * tokens / _ranks(analysis)

    def _of_token(self, analysis: Analysis) -> float:
        """Seconds of all layers for one token, at the fastest rates."""
        of_token = self.layers.once(analysis, self.layers.of_token)
        return _added(analysis, {path: Pass(took, FACTORS * took) for path, took in of_token.items()})

    def _again(self, analysis: Analysis) -> dict[str, float]:
        """Least seconds of recomputation, by the recomputing module."""
        found = by_treatments(analysis, self.layers.once(analysis, self.layers.of_layers))
        moved = self.layers.once(analysis, self.layers.moved)
        if moved is not None:
            with contextlib.suppress(Undecided):
                for path in blocks_moved_again(analysis):
                    found[path] = found.get(path, 0.0) + moved.again
        with contextlib.suppress(Undecided):
            for path, seconds in self.layers.seen.recomputed(analysis).items():
                found[path] = max(found.get(path, 0.0), seconds)
        with contextlib.suppress(Undecided):
            for path, treatment in treatments_of_blocks(analysis).items():
                delay = self.delays.of(analysis, treatment, found.get(path, 0.0))
                if delay:
                    found[path] = found.get(path, 0.0) + delay
        return found

    def _computes(self, analysis: Analysis) -> float:
        """Least seconds of the forward and backward of a micro batch in all layers."""
        return sum(one.forward + one.backward for one in self.layers.once(analysis, self.layers.together).values())

    def _recomputes(self, analysis: Analysis) -> float:
        """Least seconds in which all stages recompute what a micro batch needs."""
        return max(
            sum(self.layers.once(analysis, self._again).values()),
            self.layers.once(analysis, self.forced.of_micro_batch),
        )

    def _whatever_is_kept(self, analysis: Analysis) -> float:
        """Least seconds of a rank without recomputation, if all stages share alike; 0 where the batch is open."""
        batches = micro_batches(analysis.plan)
        if batches is None:
            return 0.0
        computes = self.layers.once(analysis, self._computes) * batches / analysis.plan.mesh.pp
        return computes + self.besides.of(analysis).seconds()

    def _alone(self, analysis: Analysis) -> float:
        """The same with recomputation, which takes longest to find, of a plan whose batch is decided."""
        batches = micro_batches(analysis.plan)
        assert batches is not None
        again = self.layers.once(analysis, self._recomputes) * batches / analysis.plan.mesh.pp
        everything = self.layers.once(analysis, self._whatever_is_kept) + again
        return max(self.layers.once(analysis, self.besides.communicates), everything)

    def _on_rank(self, analysis: Analysis) -> float:
        """Seconds of the busiest rank; what takes longest to find is left out where the rest is enough."""
        staged = analysis.plan.pipeline is not None and is_staged(analysis)
        everything = self.layers.once(analysis, self._whatever_is_kept)
        if staged and 0.0 < everything < self.enough:
            with contextlib.suppress(Undecided):
                everything = max(everything, self.layers.once(analysis, self._under_any_schedule).seconds)
        if not 0.0 < everything < self.enough:
            return everything
        everything = max(everything, self.layers.once(analysis, self._alone))
        learnt = self.shared.seconds(analysis, self.layers.once(analysis, self._recomputes))
        everything = max(everything, learnt + self.besides.of(analysis).seconds() if learnt else 0.0)
        if staged and everything < self.enough:
            with contextlib.suppress(Undecided):
                everything = max(everything, self._on_stage(analysis))
        return everything

    def _under_any_schedule(self, analysis: Analysis) -> UnderSchedules:
        """Seconds and bytes of a pipeline whose schedule may be open.

        Raises:
            Undecided: its split is open.
        """
        self.layers.once(analysis, self.layers.of_layers)  # mesh and micro batch must be decided
        block = BlockBytes()
        with contextlib.suppress(Undecided):
            block = self.layers.once(analysis, self.forced.of_block)
        adding_up = functools.partial(self.besides.adding_up, analysis)
        return under_any_schedule(analysis, self.stages, block, self.besides.of(analysis).seconds, adding_up)

    def _on_stage(self, analysis: Analysis) -> float:
        """Seconds of the busiest rank of a pipeline.

        Raises:
            Undecided: its schedule is open.
        """
        pipeline = analysis.plan.pipeline
        assert pipeline is not None
        if isinstance(pipeline.split, Hole):
            found = self.assignment(analysis)
            return 0.0 if found is None else found.bound
        learnt = self._learnt_pipeline(analysis)
        in_order = isinstance(pipeline.schedule, OrderFile)
        return learnt if in_order else max(learnt, self.layers.once(analysis, self._pipelined))

    def _pipelined(self, analysis: Analysis) -> float:
        return along_schedule(
            analysis,
            self.stages,
            self.layers.once(analysis, self.forced.of_ranks),
            self.besides.of(analysis).seconds,
            functools.partial(self.besides.adding_up, analysis),
        )

    def _learnt_pipeline(self, analysis: Analysis) -> float:
        """Seconds of a pipeline whose blocks are known from another candidate; 0 where they are not."""
        work = self.shared.blocks(analysis)
        problem = self._raised(analysis, work) if work else None
        return 0.0 if problem is None else problem.time(blocks_of_stages(analysis))

    def _raised(self, analysis: Analysis, work: Mapping[str, BlockWork]) -> StageProblem | None:
        problem = self.stage_problem(analysis)
        return (
            None
            if problem is None
            else raised_problem(problem, analysis, work, self.layers.once(analysis, self._again))
        )

    def assignment(self, analysis: Analysis) -> Assignment | None:
        """The split of least cost of a plan in which only the split is open; None of others, or without a solver.

        Its bound holds for every split; it is infinite where none fits.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        key = analysis.plan.digest, self.room(analysis)
        if key not in self._assignments:
            problem = self.stage_problem(analysis) if installed() is not None else None
            self._assignments[key] = None if problem is None else problem.solve(gap=ASSIGNED_GAP)
        return self._assignments[key]

    def learnt(self, analysis: Analysis, work: StageWork) -> Assignment | None:
        """The split of least time by what a plan's own was seen to take; None where it is no better than that.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        problem = self.stage_problem(analysis) if work.actions and installed() is not None else None
        learnt = None if problem is None else learnt_problem(problem, analysis, work, self.room(analysis))
        if learnt is None:
            return None
        found, own = learnt.solve(gap=ASSIGNED_GAP), blocks_of_stages(analysis)
        better = not learnt.fits(own) or found.seconds < learnt.time(own) * (1.0 - ASSIGNED_GAP)
        return found if better else None

    def told(self, analysis: Analysis, work: StageWork) -> float:
        """Least seconds of every split of a plan, by what its blocks were seen to compute in one of them.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        problem = self._raised(analysis, work.least) if work.actions and installed() is not None else None
        return 0.0 if problem is None else problem.solve(gap=ASSIGNED_GAP).bound

    def whatever_recomputes(self, analysis: Analysis, opened: Analysis, work: StageWork) -> float:
        """Least seconds of every plan that differs from a simulated one in recomputation, units or offloading.

        Args:
            analysis: of the plan.
            opened: of the plan in which these are holes.
            work: of its stages, where it has some: what a block computes for a micro batch, it computes in each.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        if not is_staged(analysis):
            computes = self.shared.whatever_recomputes(analysis, self.layers.once(opened, self.forced.of_micro_batch))
            return computes + self.besides.of(opened).seconds() if computes else 0.0
        known = work.least and analysis.plan.compile is None
        problem = self.stage_problem(analysis, recomputes=False) if known else None
        if problem is None:
            return 0.0
        computed = {start: took._replace(recomputed=0.0) for start, took in work.least.items()}
        return raised_problem(problem, analysis, computed, {}).time(blocks_of_stages(analysis))

    def stage_problem(self, analysis: Analysis, *, recomputes: bool = True) -> StageProblem | None:
        """The assignment of a candidate's stages at least costs; None where more than the split is open.

        Args:
            analysis: of the candidate.
            recomputes: with what the candidate recomputes.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        pipeline = analysis.plan.pipeline
        split: object = None if pipeline is None else pipeline.split
        if any(item.hole is not split for item in analysis.plan.holes()):
            return None
        if not is_staged(analysis) or not self.layers.once(analysis, self.layers.of_token):
            return None
        least = self.layers.once(analysis, self.layers.of_layers)
        again = self.layers.once(analysis, self._again) if recomputes else {}
        return least_problem(analysis, least, again, self.for_tensors(analysis))

    def for_tensors(self, analysis: Analysis) -> float:
        """Bytes of active memory that a rank may take: see :func:`legoai.cost.search.room.for_tensors`."""
        return analysis.once(("bytes for tensors", self.profile), lambda: for_tensors(analysis, self.machine(analysis)))

    def room(self, analysis: Analysis) -> Room:
        """Bytes that a rank may take, by its device and by what the plan requires."""
        return room_of(analysis, self.machine(analysis))


def _ranks(analysis: Analysis) -> int:
    """Ranks of the mesh, which are as many as the cluster's devices where axes are open.

    Raises:
        Undecided: the cluster is a hole.
    """
    try:
        return analysis.plan.mesh.world_size
    except Undecided:
        cluster = analysis.plan.cluster
        devices = cluster.devices_per_host(analysis.directory)
        if devices is None:
            raise
        return cluster.hosts * devices


def _added(analysis: Analysis, least: Mapping[str, Pass]) -> float:
    """Seconds of all layers in forward, backward and recomputation."""
    return sum(one.forward + one.backward for one in least.values()) + sum(by_treatments(analysis, least).values())
