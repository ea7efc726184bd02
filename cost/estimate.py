"""Estimate of a plan: step time, memory, and its requirements."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from legoai.cost import assumptions
from legoai.cost.composed import SteadyBlock, composed_breakdown
from legoai.cost.kernels.model_flops import model_flops, product_dtype
from legoai.cost.machine.cluster import Machine, machine_of
from legoai.cost.machine.kernel_time import NoModelError
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.memory.host import HostMemory, host_memory
from legoai.cost.memory.storages import MemoryReport, memory
from legoai.cost.memory.use import MemoryUse, memory_use, needs_of
from legoai.cost.network.topology import World
from legoai.cost.one_device import products_on_one_device
from legoai.cost.pieces import PieceOf, piece_of
from legoai.cost.pipelines.cache import cached_or_simulated
from legoai.cost.profiles import ProfileError
from legoai.cost.requirements import RequirementResult, checked
from legoai.cost.timing.breakdown import Breakdown, breakdown
from legoai.cost.timing.engine import simulate
from legoai.cost.timing.intervals import since
from legoai.cost.timing.rank_timeline import ActionTime
from legoai.cost.timing.timeline import Interval, Timeline
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.trace import Trace
from legoai.dsl.analysis.allocator import expandable_segments
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.context import busiest_rank
from legoai.lowering.program import Program
from legoai.specs.cluster import CatalogueError
from legoai.specs.directives.batch import unit_of
from legoai.specs.directives.require import METRICS, Requirement
from legoai.specs.models.import_path import add_author_folder, author_folder
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

Progress = Callable[[str], None]
_TRILLION: Final = 1e12


class CannotEstimateError(ValueError):
    """A plan cannot be costed; the message says why, for the plan's author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """Estimate of one rank in a step.

    Attributes:
        rank: global.
        stage: its coordinate on the pipeline axis.
        trace: of the rank, from the setup on.
        span: the step's records in the trace.
        intervals: of the step's operations on its device, in seconds from the beginning of the step.
        breakdown: of the step's time.
        memory: active memory.
        use: reserved memory and memory outside torch, and whether all of it fits.
        bubble: share of the step in which the rank waits for others of the pipeline.
        actions: of a pipeline, in issue order.
        block: steady-state cost of each further block, where it is known.
    """

    rank: int
    stage: int
    trace: Trace = field(repr=False)
    span: range = field(repr=False)
    intervals: Sequence[Interval] = field(repr=False)
    breakdown: Breakdown = field(repr=False)
    memory: MemoryReport = field(repr=False)
    use: MemoryUse
    bubble: float = 0.0
    actions: tuple[ActionTime, ...] = field(default=(), repr=False)
    block: SteadyBlock | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimate of a plan's steady-state step, such as the second.

    Attributes:
        plan: its name.
        digest: its hash.
        variant: which of the plan's variants; None is the plan itself.
        machine: cluster and profile.
        step_time: seconds of one optimizer step, from the first operation that the host issues to the end of the last
            on the device.
        tokens_per_step: of all ranks; samples, where a plan of images has no sequences.
        unit: of these: `tokens` or `samples`.
        model_flops: of the model in a step, on all devices; see :func:`legoai.cost.kernels.model_flops.model_flops`.
        flops_convention: how they were counted.
        peak_flops: of one device, dense, in the dtype of most products of the forward, per second.
        peak_source: source of that figure.
        ranks: those that were simulated: one, or one for each rank of the pipeline.
        host_memory: of offloaded state; None where none is.
        bubble_fraction: share of the step in which the ranks of the pipeline wait, on average.
        requirements: of the plan, in its order.
        assumptions: made where profile or plan state nothing.
        whole: whether every block and micro batch was timed.
    """

    plan: str
    digest: str
    variant: str | None
    machine: Machine = field(repr=False)
    step_time: float
    tokens_per_step: int
    unit: str
    model_flops: float
    flops_convention: str
    peak_flops: float
    peak_source: str
    ranks: tuple[RankEstimate, ...]
    host_memory: HostMemory | None = None
    bubble_fraction: float = 0.0
    requirements: tuple[RequirementResult, ...] = ()
    assumptions: tuple[str, ...] = ()
    whole: bool = True

    @property
    def world_size(self) -> int:
        """Devices that the plan uses."""
        return self.ranks[0].trace.world

    @property
    def fullest(self) -> RankEstimate:
        """The rank with most active memory at its peak."""
        return max(self.ranks, key=lambda item: item.memory.peak)

    @property
    def slowest(self) -> RankEstimate:
        """The rank with the longest busy time."""
        return max(self.ranks, key=lambda item: item.breakdown.seconds - item.breakdown.idle)

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput of one device."""
        return self.tokens_per_step / self.step_time / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOPs of the model divided by what the devices could compute in that time."""
        return self.model_flops / (self.step_time * self.peak_flops * self.world_size)

    @property
    def exposed_communication(self) -> float:
        """Seconds of the step in which a rank communicates and does not compute, averaged over the simulated ranks."""
        return _mean([item.breakdown.exposed for item in self.ranks])

    @property
    def exposed_by_axis(self) -> Mapping[str, float]:
        """:attr:`exposed_communication` by mesh axis."""
        axes = dict.fromkeys(axis for item in self.ranks for axis in item.breakdown.exposed_by_axis)
        return {axis: _mean([item.breakdown.exposed_by_axis.get(axis, 0.0) for item in self.ranks]) for axis in axes}

    @property
    def recompute(self) -> float:
        """Seconds of recomputation, averaged over the simulated ranks."""
        return _mean([item.breakdown.recompute for item in self.ranks])

    @property
    def device_hours_per_trillion_tokens(self) -> float:
        """Device-hours for 10^12 tokens at this throughput."""
        return _TRILLION / self.tokens_per_second_per_device / 3600

    @property
    def peak_active(self) -> int:
        """Bytes of active memory on the fullest rank."""
        return self.fullest.memory.peak

    @property
    def peak_reserved(self) -> int:
        """Maximum over the ranks of the bytes that the allocator reserves."""
        return max(item.use.reserved for item in self.ranks)

    @property
    def fits(self) -> bool | None:
        """Whether every rank's memory fits its device; None where the device's capacity is not known."""
        known = [item.use.fits for item in self.ranks]
        return None if None in known else all(known)

    @property
    def share_by_model(self) -> Mapping[str, float]:
        """Share of all operations' time by the model that estimated it, such as `measured table` or `roofline`."""
        seconds: dict[str, float] = {}
        for item in self.ranks:
            for model, took in item.breakdown.by_model.items():
                seconds[model] = seconds.get(model, 0.0) + took
        total = sum(seconds.values()) or 1.0
        return {name: took / total for name, took in sorted(seconds.items(), key=lambda pair: -pair[1])}

    def metric(self, name: str, dimension: str) -> float:
        """Return a figure that a plan may require, in the dimension in which it is bounded.

        Args:
            name: of :data:`legoai.specs.directives.require.METRICS`.
            dimension: `fraction` is of the step.
        """
        assert name in METRICS, name
        seconds = {"step_time": self.step_time, "exposed_comm": self.exposed_communication, "recompute": self.recompute}
        if name in seconds:
            return seconds[name] / self.step_time if dimension == "fraction" else seconds[name]
        return {
            "peak_memory": float(self.peak_active),
            "reserved_memory": float(self.peak_reserved),
            "bubble": self.bubble_fraction,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_second_per_device,
        }[name]


def estimate(
    program: Program,
    plan: Plan,
    manifest: Manifest,
    *,
    directory: Path = Path(),
    profile: str | None = None,
    rank: int | None = None,
    whole: bool = True,
    progress: Progress | None = None,
) -> Estimate:
    """Simulate one step of a lowered plan.

    Without a pipeline one rank represents all: every rank runs the same program, most on shards of the same shapes. It
    is the one with the most work (:func:`legoai.dsl.analysis.parallelism.context.busiest_rank`).
    Each collective takes as long as in the slowest group of its axes, as others may lie over more hosts.

    Args:
        program: what the plan was lowered to.
        plan: the plan.
        manifest: of its model.
        directory: of the plan's file: factories and profiles are found from there.
        profile: of other devices than the plan's; see :func:`legoai.cost.machine.cluster.machine_of`.
        rank: global rank that is simulated, by default the busiest; ignored under a pipeline, where one rank of each
            stage is simulated.
        whole: whether to time every block and micro batch; otherwise a few of equal ones, if these reach a steady state
            (:mod:`legoai.cost.composed`), and without the tables of modules and collectives.
        progress: called with a description of the current work.

    Raises:
        CannotEstimateError: the devices have no profile, or the program does something that cannot be simulated.
    """
    say = progress or (lambda _: None)
    plan = plan.effective
    world = plan.mesh.world_size
    rank = busiest_rank(plan) if rank is None else rank
    if not 0 <= rank < world:
        raise CannotEstimateError(f"the plan has {world} ranks, counted from 0, and no rank {rank}")
    try:
        machine = machine_of(plan.cluster, world, directory=directory, override=profile)
        machine = dataclasses.replace(
            machine, expandable_segments=expandable_segments(plan), world=World(world, plan.mesh.pp)
        )
        with _importable(author_folder(plan.model.family, directory)):
            analysis = Analysis(plan, manifest, directory)
            simulated = _simulate(program, analysis, machine, rank=rank, whole=whole, say=say)
            say("adding up")
            steps = {item.rank: item.trace.between(item.span) for item in simulated.ranks}
            peak, source = machine.peak(product_dtype(plan, steps), plan.precision.param)
            alone = functools.partial(products_on_one_device, plan, manifest, directory, machine.device, _running)
            flops, convention = model_flops(plan, manifest, steps, alone)
    except (ProfileError, CatalogueError, NoModelError) as error:
        raise CannotEstimateError(str(error)) from error
    found = Estimate(
        plan=plan.name,
        digest=plan.digest,
        variant=plan.variant,
        machine=machine,
        step_time=simulated.step_time,
        tokens_per_step=plan.batch.global_batch * (plan.batch.seq_len or 1),
        unit=unit_of(plan.batch),
        model_flops=flops,
        flops_convention=convention,
        peak_flops=peak,
        peak_source=source,
        ranks=simulated.ranks,
        host_memory=host_memory(plan, manifest, directory, machine),
        bubble_fraction=simulated.bubble_fraction,
        whole=simulated.whole,
        assumptions=(
            *assumptions.of_machine(machine),
            *assumptions.of_full_batch(plan),
            *assumptions.of_kernels(plan, manifest, directory, machine.profile),
            *assumptions.of_convolutions(steps, machine, simulated.step_time),
            *assumptions.of_profile(plan, machine.device.kind),
        ),
    )
    return _with_requirements(found, plan.require)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A step's time, the simulated ranks, in a pipeline their waits, and whether all was simulated."""

    step_time: float
    ranks: tuple[RankEstimate, ...]
    bubble_fraction: float = 0.0
    whole: bool = True


def _simulate(
    program: Program, analysis: Analysis, machine: Machine, *, rank: int, whole: bool, say: Progress
) -> Simulated:
    if analysis.plan.pipeline is not None:
        simulate_all = functools.partial(_simulate_pipeline, program, analysis.plan, machine, say=say)
        return cached_or_simulated(program, analysis, machine, simulate_all)

    @contextlib.contextmanager
    def capturing() -> Iterator[None]:
        say("running two steps on a simulated device")
        with _running():
            yield

    found = piece_of(program, analysis, rank=rank, kind=machine.device.kind, gpu=machine.device, capturing=capturing)
    if not whole and isinstance(found, PieceOf) and found.piece.containers:
        composed = _compose(found, machine)
        if composed is not None:
            return composed
    trace = found.trace() if isinstance(found, PieceOf) else found
    with uncollected():
        say("timing its operations")
        timeline = simulate(trace, OpCosts(machine=machine), machine.host())
        say("following its memory")
        done = rank_estimate(trace, timeline, machine)
    return Simulated(step_time=done.breakdown.seconds, ranks=(done,))


def _compose(found: PieceOf, machine: Machine) -> Simulated | None:
    """Return a rank of which few equal blocks and micro batches are timed; None where these reach no steady state."""
    with uncollected():
        composed = composed_breakdown(found, machine)
        if composed is None:
            return None
        took = composed.breakdown
        trace = found.trace()
        rank = RankEstimate(
            rank=trace.rank, stage=trace.stage, trace=trace, span=trace.steps[-1], intervals=(), breakdown=took,
            memory=memory(trace, tables=False), use=memory_use(trace, machine), block=composed.block,
        )  # fmt: skip
    return Simulated(step_time=took.seconds, ranks=(rank,), whole=False)


def _simulate_pipeline(program: Program, plan: Plan, machine: Machine, *, say: Progress) -> Simulated:
    """Simulate one rank of each coordinate on the `pp` axis; its memory is computed in the process that captures it."""
    say("running two steps of every pipeline rank on simulated devices")
    with _running(), uncollected():
        from legoai.cost.step import simulate_pipeline

        step = simulate_pipeline(
            program,
            world=plan.mesh.world_size,
            pp=plan.mesh.pp,
            first=busiest_rank(plan),
            kind=machine.device.kind,
            gpu=machine.device,
            cost=OpCosts(machine=machine),
            host=machine.host(),
            measure=functools.partial(needs_of, machine=machine),
        )
    ranks = tuple(
        dataclasses.replace(
            rank_estimate(item.trace, item.times.timeline, machine, measured=item.measured),
            bubble=item.bubble,
            actions=item.times.actions,
        )
        for item in step.ranks
    )
    return Simulated(step_time=step.seconds, ranks=ranks, bubble_fraction=step.bubble)


def rank_estimate(
    trace: Trace, timeline: Timeline, machine: Machine, *, measured: tuple[MemoryReport, MemoryUse] | None = None
) -> RankEstimate:
    """Sum up a rank's second step, which is the last of its trace.

    Args:
        trace: of the rank.
        timeline: of the trace, or of its second step alone.
        machine: on which it runs.
        measured: what it needs, if that is known already.
    """
    active, use = measured if measured is not None else (memory(trace), memory_use(trace, machine))
    span = trace.steps[-1]
    begin, end = _bounds(timeline)
    intervals = since(timeline.intervals, begin, trace.translation)
    end = max(end - begin, intervals.end)
    return RankEstimate(
        rank=trace.rank,
        stage=trace.stage,
        trace=trace,
        span=span,
        intervals=intervals,
        breakdown=breakdown(intervals, end),
        memory=active,
        use=use,
    )


def _bounds(timeline: Timeline) -> tuple[float, float]:
    """Return the times at which the host begins and ends the last step, including its wait for the device."""
    marks = dict(timeline.marks)
    last = max(name for name in marks if name.startswith("step "))
    return marks[last], marks[f"end {last}"]


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """Let a program run on simulated devices, and raise CannotEstimateError where it cannot; imports torch lazily."""
    from legoai.cost.simulated.device import SimulationError
    from legoai.runtime.random_state import kept_random_state

    try:
        with kept_random_state(), warnings.catch_warnings():
            # The same appear in a run, also of autocast of CUDA on a CPU. No module of a model is called LeftOut.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
            warnings.filterwarnings("ignore", message="CUDA is not available or torch_xla|.* in module LeftOut")
            yield
    except SimulationError as error:
        raise CannotEstimateError(str(error)) from error


@contextlib.contextmanager
def _importable(directory: Path | None) -> Iterator[None]:
    """Let the program import a factory from the plan's directory, if it has one."""
    before = list(sys.path)
    add_author_folder(directory)
    try:
        yield
    finally:
        sys.path[:] = before


def _with_requirements(found: Estimate, required: Sequence[Requirement]) -> Estimate:
    results = tuple(checked(item, found.metric(item.metric, item.dimension)) for item in required)
    return dataclasses.replace(found, requirements=results)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
