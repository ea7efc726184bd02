"""Lower bounds of a candidate's step time and memory that need no simulation.

Each is admissible: no simulation of the candidate, nor of any completion of its holes, gives less. A part that depends
on an open hole is 0, except recomputation and gathers that memory forces under every value, and the pipeline schedule,
of which the least counts (:mod:`legoai.cost.search.stages.bounds`).

Time. Kernels of one rank run one after another, and no product is faster than the fastest rate of its profile
(:func:`legoai.cost.search.lower_bounds.layers.fastest_rate`). All ranks together compute at least the products of the
model: of each linear layer one in forward and two in backward for each token, attention once in forward and twice in
backward, and recomputation. A rank computes at least its share of its stages' products, since what is not sharded is
computed by every rank. With mesh and micro batch decided, the bound adds:

- the fastest of the local shapes of each layer (:mod:`legoai.cost.search.lower_bounds.local_kernels`), with the
  collectives on `tp` that it waits for (:mod:`legoai.cost.search.lower_bounds.model_layers`);
- where styles on `tp` are open, the least of any choice (:mod:`legoai.cost.search.lower_bounds.open_holes.styles`);
- FSDP's copies, its exposed communication, and the slowdown of kernels beside the rest
  (:mod:`legoai.cost.search.candidate_bounds.data_parallel`);
- the loss beside layers (:mod:`legoai.cost.search.lower_bounds.loss`), and the optimizer's update
  (:mod:`legoai.cost.search.lower_bounds.update`);
- accumulation of unsharded gradients (:mod:`legoai.cost.search.lower_bounds.gradient_accumulation`);
- recomputation of what does not fit (:mod:`legoai.cost.search.candidate_bounds.recomputation`), as open treatments
  allow (:mod:`legoai.cost.search.lower_bounds.open_holes.treatments`);
- the pipeline's fill and drain, and where only the split is open, the best assignment of stages
  (:mod:`legoai.cost.search.stages.assignment`).

Simulated candidates tighten it: by all layers of candidates that share them
(:mod:`legoai.cost.search.lower_bounds.shared_work`), by equal blocks
(:mod:`legoai.cost.search.lower_bounds.observed.blocks`), by what communication beside these adds
(:mod:`legoai.cost.search.candidate_bounds.block_delays`), and by what steps take beyond all that
(:mod:`legoai.cost.search.candidate_bounds.shortfalls`).

Memory. Sharded parameters, gradients and optimizer state (:func:`legoai.dsl.analysis.magnitudes.state.state_bytes`); or
parameters and optimizer state with unsharded parameters, the activations of all blocks
(:mod:`legoai.cost.search.lower_bounds.activations`), and either the logits at the beginning of a backward, or all that
the backward of a block's feed-forward module reads, with the buffers of units then
(:mod:`legoai.cost.search.lower_bounds.communication.units_in_backward`). Simulated candidates whose blocks all have one
treatment give the peaks of those that mix them (:mod:`legoai.cost.search.candidate_bounds.observed_peaks`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from legoai.cost.machine.cluster import Machine, machine_of
from legoai.cost.search.candidate_bounds.block_delays import BlockDelays
from legoai.cost.search.candidate_bounds.data_parallel import DataParallelBounds
from legoai.cost.search.candidate_bounds.memory import MemoryBounds
from legoai.cost.search.candidate_bounds.memory_limits import for_tensors, room_of
from legoai.cost.search.candidate_bounds.recomputation import RecomputationBounds
from legoai.cost.search.candidate_bounds.shortfalls import Shortfalls
from legoai.cost.search.lower_bounds.local_kernels import Pass
from legoai.cost.search.lower_bounds.loss import seconds_of_loss
from legoai.cost.search.lower_bounds.memory_bound_kernels import Moved
from legoai.cost.search.lower_bounds.model_layers import FACTORS, ModelLayers
from legoai.cost.search.lower_bounds.observed.blocks import treatments_of_blocks
from legoai.cost.search.lower_bounds.observed.steady_blocks import SteadyBlocks
from legoai.cost.search.lower_bounds.recomputation import blocks_moved_again, by_treatments
from legoai.cost.search.lower_bounds.shared_work import BlockWork, MicroBatchWork, SharedWork
from legoai.cost.search.lower_bounds.update import seconds_of_update
from legoai.cost.search.memory.points import MemoryPoints
from legoai.cost.search.stages.assignment import Assignment, StageProblem
from legoai.cost.search.stages.block_bytes import BlockBytes
from legoai.cost.search.stages.bounds import UnderSchedules, along_schedule, under_any_schedule
from legoai.cost.search.stages.costs import (
    Room,
    StageWork,
    blocks_of_stages,
    least_problem,
    observed_problem,
    raised_problem,
)
from legoai.cost.search.stages.stage_times import StageTimes
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.parallelism.mesh import all_ranks
from legoai.dsl.analysis.stages.pipeline import is_staged
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
        recomputation: least recomputation.
        data_parallel: least seconds beside layers.
        delays: least seconds by which blocks are delayed.
        shortfalls: least seconds that are in none of these.
        memory: least bytes, but for what a pipeline's schedule decides.
    """

    profile: str | None = None
    enough: float = math.inf
    shared: SharedWork = field(default_factory=SharedWork)
    layers: ModelLayers = field(init=False)
    stages: StageTimes = field(init=False)
    recomputation: RecomputationBounds = field(init=False)
    data_parallel: DataParallelBounds = field(init=False)
    delays: BlockDelays = field(init=False)
    shortfalls: Shortfalls = field(init=False)
    memory: MemoryBounds = field(init=False)
    _machines: dict[str, Machine] = field(default_factory=dict)
    _assignments: dict[tuple[str, Room], Assignment | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Layers are bounded on this machine."""
        self.layers = ModelLayers(self.machine, SteadyBlocks(self.machine, self.for_tensors))
        self.stages = StageTimes(self.layers, self._again)
        self.data_parallel = DataParallelBounds(self.layers, self.for_tensors)
        self.delays = BlockDelays(self.layers, self.data_parallel)
        self.recomputation = RecomputationBounds(self.layers, self.for_tensors, self.delays.of)
        self.memory = MemoryBounds(self.layers, self.shared)
        self.shortfalls = Shortfalls(lambda analysis: self.layers.once(analysis, self._added_up))

    @property
    def known(self) -> object:
        """Version of all observations: while it is the same, bounds are too."""
        return self.layers.own, self.layers.observed.revision, self.shortfalls.revision, self.memory.peaks.revision

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

    def __call__(self, analysis: Analysis, seconds: float | None = None) -> Bounds:
        """The bounds of a candidate, which may have holes; `seconds` is its :meth:`step_time`, where that is known.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        seconds = self.step_time(analysis) if seconds is None else seconds
        # Where no split fits, nothing does.
        return Bounds(step_time=seconds, memory=self._memory(analysis) if math.isfinite(seconds) else math.inf)

    def step_time(self, analysis: Analysis) -> float:
        """The bound of the step time alone, as :meth:`__call__` gives it."""
        seconds = 0.0
        with contextlib.suppress(Undecided):
            seconds = self._seconds(analysis)
        return max(seconds, self.shared.seconds(analysis, 0.0))

    def as_sum(self, analysis: Analysis) -> float:
        """Least seconds of a complete candidate without stages, as a sum over its blocks, each with its treatment."""
        batches = micro_batches(analysis.plan)
        assert batches is not None
        again = sum(self.layers.once(analysis, self._again).values()) * batches
        return self.layers.once(analysis, self._whatever_is_kept) + again + self.shortfalls.of(analysis)

    def observe(self, analysis: Analysis, work: MicroBatchWork, moved: Sequence[Moved], points: MemoryPoints) -> None:
        """Note what a simulated candidate shows of others: the work of a micro batch, and what its blocks moved."""
        self.shared.observe(analysis, work)
        self.layers.observe(analysis, moved, work, points.released if points.blocks else 0.0)
        self.memory.peaks.observe(analysis, points)

    def unobserved(self, analysis: Analysis) -> list[str]:
        """Keys of what simulating a candidate would show of others, without what is known."""
        of_blocks = self.layers.observed.unobserved(analysis) if analysis.plan.pipeline is None else None
        return [one for one in (of_blocks, self.shared.unobserved(analysis)) if one is not None]

    def _memory(self, analysis: Analysis) -> float:
        least = self.memory.of(analysis)
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

    def _seconds(self, analysis: Analysis) -> float:
        everything = self.layers.once(analysis, self._of_all_ranks)
        try:
            return max(everything, self._on_rank(analysis)) if everything < self.enough else everything
        except Undecided:
            return everything

    def _of_all_ranks(self, analysis: Analysis) -> float:
        """Seconds of a step on a rank, if all share the work of the model, at the fastest rates."""
        plan, of_token = analysis.plan, self.layers.once(analysis, self.layers.of_token)
        if not of_token:
            return 0.0
        tokens = plan.batch.global_batch * plan.batch.length
        return self.layers.once(analysis, self._of_token) * tokens / all_ranks(analysis)

    def _of_token(self, analysis: Analysis) -> float:
        """Seconds of all layers for one token, at the fastest rates, in forward, backward and recomputation."""
        of_token = self.layers.once(analysis, self.layers.of_token)
        least = {path: Pass(took, FACTORS * took) for path, took in of_token.items()}
        return (1 + FACTORS) * sum(of_token.values()) + sum(by_treatments(analysis, least).values())

    def _again(self, analysis: Analysis) -> dict[str, float]:
        """Least seconds of recomputation, by the recomputing module."""
        found = by_treatments(analysis, self.layers.once(analysis, self.layers.of_layers))
        moved = self.layers.once(analysis, self.layers.moved)
        if moved is not None:
            with contextlib.suppress(Undecided):
                for path in blocks_moved_again(analysis):
                    found[path] = found.get(path, 0.0) + moved.again
        with contextlib.suppress(Undecided):
            for path, seconds in self.layers.observed.recomputed(analysis).items():
                found[path] = max(found.get(path, 0.0), seconds)
        delay_of = functools.cache(functools.partial(self.delays.of, analysis))
        with contextlib.suppress(Undecided):
            for path, treatment in treatments_of_blocks(analysis).items():
                if delay := delay_of(treatment, found.get(path, 0.0)):
                    found[path] = found.get(path, 0.0) + delay
        return found

    def _computes(self, analysis: Analysis) -> float:
        """Least seconds of the forward and backward of a micro batch in all layers, and in its loss."""
        layers = self.layers.once(analysis, self.layers.together).values()
        return sum(one.forward + one.backward for one in layers) + self.layers.once(analysis, self._of_loss)

    def _of_loss(self, analysis: Analysis) -> float:
        """Least seconds of the loss of a micro batch."""
        with contextlib.suppress(Undecided):
            return seconds_of_loss(analysis, self.machine(analysis))
        return 0.0

    def _of_update(self, analysis: Analysis) -> float:
        """Least seconds of the optimizer's update on a mean rank."""
        with contextlib.suppress(Undecided):
            return seconds_of_update(analysis, self.machine(analysis))
        return 0.0

    def _recomputes(self, analysis: Analysis) -> float:
        """Least seconds in which all stages recompute what a micro batch needs."""
        return max(
            sum(self.layers.once(analysis, self._again).values()),
            self.layers.once(analysis, self.recomputation.of_micro_batch),
        )

    def _whatever_is_kept(self, analysis: Analysis) -> float:
        """Least seconds of a rank without recomputation, if the stages share it equally; 0 where the batch is open."""
        batches = micro_batches(analysis.plan)
        if batches is None:
            return 0.0
        computes = self.layers.once(analysis, self._computes) * batches / analysis.plan.mesh.pp
        return computes + self.data_parallel.of(analysis).seconds() + self.layers.once(analysis, self._of_update)

    def _added_up(self, analysis: Analysis) -> float:
        """The same with recomputation, which takes longest to find, of a plan whose batch is decided."""
        batches = micro_batches(analysis.plan)
        assert batches is not None
        again = self.layers.once(analysis, self._recomputes) * batches / analysis.plan.mesh.pp
        return self.layers.once(analysis, self._whatever_is_kept) + again

    def _alone(self, analysis: Analysis) -> float:
        """The same with what is known from other candidates of its ends, or where communication takes longer."""
        everything = self.layers.once(analysis, self._added_up) + self.shortfalls.of(analysis)
        return max(self.layers.once(analysis, self.data_parallel.communicates), everything)

    def _on_rank(self, analysis: Analysis) -> float:
        """Seconds of the busiest rank; what takes longest to find is left out where the rest is enough."""
        staged = analysis.plan.pipeline is not None and is_staged(analysis)
        everything = self.layers.once(analysis, self._whatever_is_kept)
        if staged and 0.0 < everything < self.enough:
            with contextlib.suppress(Undecided):
                everything = max(everything, self.layers.once(analysis, self._under_any_schedule).seconds)
        if not 0.0 < everything < self.enough:
            return everything
        everything = max(everything, self._alone(analysis))
        observed = self.shared.seconds(analysis, self.layers.once(analysis, self._recomputes))
        everything = max(everything, observed + self.data_parallel.of(analysis).seconds() if observed else 0.0)
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
            block = self.layers.once(analysis, self.recomputation.of_block)
        adding_up = functools.partial(self.data_parallel.adding_up, analysis)
        return under_any_schedule(analysis, self.stages, block, self.data_parallel.of(analysis).seconds, adding_up)

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
        observed = self._observed_pipeline(analysis)
        in_order = isinstance(pipeline.schedule, OrderFile)
        return observed if in_order else max(observed, self.layers.once(analysis, self._pipelined))

    def _pipelined(self, analysis: Analysis) -> float:
        return along_schedule(
            analysis,
            self.stages,
            self.layers.once(analysis, self.recomputation.of_ranks),
            self.data_parallel.of(analysis).seconds,
            functools.partial(self.data_parallel.adding_up, analysis),
        )

    def _observed_pipeline(self, analysis: Analysis) -> float:
        """Seconds of a pipeline whose blocks are known from another candidate; 0 where they are not."""
        work = self.shared.blocks(analysis)
        problem = self._raised(analysis, work) if work else None
        return 0.0 if problem is None else problem.time(blocks_of_stages(analysis))

    def _raised(self, analysis: Analysis, work: Mapping[str, BlockWork]) -> StageProblem | None:
        problem = self.stage_problem(analysis)
        again = {} if problem is None else self.layers.once(analysis, self._again)
        return None if problem is None else raised_problem(problem, analysis, work, again)

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

    def better_split(self, analysis: Analysis, work: StageWork) -> Assignment | None:
        """The split of least time by what a plan's own was observed to take; None where it is no better than that.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        problem = self.stage_problem(analysis) if work.actions and installed() is not None else None
        observed = None if problem is None else observed_problem(problem, analysis, work, self.room(analysis))
        if observed is None:
            return None
        found, own = observed.solve(gap=ASSIGNED_GAP), blocks_of_stages(analysis)
        better = not observed.fits(own) or found.seconds < observed.time(own) * (1.0 - ASSIGNED_GAP)
        return found if better else None

    def of_every_split(self, analysis: Analysis, work: StageWork) -> float:
        """Least seconds of every split of a plan, by what its blocks were observed to compute in one of them.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        problem = self._raised(analysis, work.least) if work.actions and installed() is not None else None
        return 0.0 if problem is None else problem.solve(gap=ASSIGNED_GAP).bound

    def whatever_is_recomputed(self, analysis: Analysis, opened: Analysis, work: StageWork) -> float:
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
            computes = self.shared.whatever_is_recomputed(
                analysis, self.layers.once(opened, self.recomputation.of_micro_batch)
            )
            return computes + self.data_parallel.of(opened).seconds() if computes else 0.0
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
        """Bytes of active memory that a rank may take."""
        return analysis.once(("bytes for tensors", self.profile), lambda: for_tensors(analysis, self.machine(analysis)))

    def room(self, analysis: Analysis) -> Room:
        """Bytes that a rank may take, by its device and by what the plan requires."""
        return room_of(analysis, self.machine(analysis))
