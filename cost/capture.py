"""Capture of two optimizer steps of one rank of a lowered program.

The program's own `trainer()` is built on the simulated device, and its own training step runs there. The capture knows
nothing of models or plans: it records the operators that the program dispatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legoai.cost.compilation.modules import compilation
from legoai.cost.pipelines.actions import FEWEST
from legoai.cost.pipelines.patterns import DepthError, UnequalError
from legoai.cost.replay.blocks import class_of_name, classes_of_held, shorten
from legoai.cost.replay.building import piece_of
from legoai.cost.replay.piece import Piece
from legoai.cost.replay.repeated_blocks import RepeatedBlocks
from legoai.cost.simulated.device import SIM, Kind, SimulationError
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.few_batches import DISTINCT, FewBatches, ValuelessSource
from legoai.cost.simulated.host import host_memory
from legoai.cost.simulated.operators.autocast import autocast_rules, may_autocast
from legoai.cost.simulated.operators.grouped_products import has_grouped_kernel
from legoai.cost.simulated.preparation import Preparation
from legoai.cost.simulated.process import collectives_as_traced, simulated_device
from legoai.cost.simulated.program import trainer_of
from legoai.cost.simulated.recorder import Capture
from legoai.cost.simulated.unfilled import built_unfilled
from legoai.cost.trace.editing import EditableTrace
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.records import Mark
from legoai.cost.trace.segments import Instance, Item
from legoai.cost.trace.trace import Trace, records_of
from legoai.dsl.analysis.repetition.repeated_blocks import BlockClasses
from legoai.lowering.graph.measurement.profile import on_simulated
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.program import Program
from legoai.runtime import Trainer
from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.device import Device
from legoai.runtime.initialize import cast_parameters, plain_path
from legoai.runtime.torch_internals.compiler.dynamo import compiled_run_eagerly
from legoai.runtime.torch_internals.compiler.graphs import disable_current_modes
from legoai.runtime.torch_internals.patching import patched_attribute
from legoai.runtime.training import trainer as of_trainer
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.state import StepFunction, Training
from legoai.runtime.training.step import take_step
from legoai.specs.cluster import Device as CatalogueDevice

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from legoai.cost.pipelines.deep_stages import DerivedTraces
    from legoai.runtime.parallelism.pipeline import Pipeline

_LEAST_LEFT_OUT: Final = 3
"""Fewest blocks of a stage that are worth leaving out: repeating the captured blocks takes as long as capturing two."""

STEPS: Final = 2
"""Optimizer steps that are captured: the first allocates the optimizer state, the second represents all later ones."""


def capture(
    program: Program | str | types.ModuleType | Trainer,
    *,
    world: int,
    rank: int = 0,
    kind: Kind = "cuda",
    gpu: CatalogueDevice | None = None,
    replay: bool = True,
) -> Trace:
    """Capture the first two steps of a lowered program on the simulated device.

    The trace begins with the allocations that exist before the first step. `Mark("step 1")` and `Mark("step 2")` stand
    before the steps, `Mark("end step 2")` is the last record; in each step `micro batch N`, `forward PATH` and
    `end PATH` mark the begin and end of its parts.

    The first step has only one micro batch: it serves to allocate the optimizer state and persistent buffers.

    Args:
        program: as lowered, or its text, or its module, or what its `trainer()` returns.
        world: number of ranks for which it was lowered.
        rank: the simulated rank.
        kind: of device, which decides the kernels.
        gpu: the plan's device, whose properties a compiled program depends on; None where it is no GPU.
        replay: whether equal micro batches, and the repeated blocks of a lowered program, are captured only once and
            then replayed. The trace is the same.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
        ValueError: the world has no such rank.
    """
    if not 0 <= rank < world:
        raise ValueError(f"a world of {world} ranks has no rank {rank}")
    if replay:
        found = capture_piece(program, world=world, rank=rank, kind=kind, gpu=gpu)
        if isinstance(found, Piece):
            return found.trace()
        if found is not None:
            return found
    taken, trace = _captured(program, world=world, rank=rank, kind=kind, gpu=gpu)
    return dataclasses.replace(trace, items=taken.finished())


def capture_piece(
    program: Program | str | types.ModuleType | Trainer,
    *,
    world: int,
    rank: int = 0,
    kind: Kind = "cuda",
    gpu: CatalogueDevice | None = None,
) -> Piece | Trace | None:
    """Capture the first two steps of a program with few micro batches and few blocks.

    The arguments are those of :func:`capture`.

    Returns:
        The piece from which the traces of the program, and of programs that differ only in depth and number of micro
        batches, are composed; the trace itself where the program repeats nothing or is a pipeline; None where
        repetitions are not equal.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
    """
    classes = program.block_classes if isinstance(program, Program) else ()
    for containers in (classes, ()) if classes else ((),):
        try:
            found = _shortened(program, world=world, rank=rank, kind=kind, gpu=gpu, containers=containers)
        except UnequalError:  # actions of a pipeline
            taken = _few_actions(program, world=world, rank=rank, kind=kind, gpu=gpu, ways=(True,))
            return None if taken is None else dataclasses.replace(taken[1], items=taken[0].finished())
        if found is not None:
            return found
    return None


def capture_equal_ranks(
    program: Program,
    *,
    world: int,
    pp: int,
    first: int = 0,
    coordinate: int,
    others: Sequence[int],
    kind: Kind = "cuda",
    gpu: CatalogueDevice | None = None,
) -> list[Trace]:
    """Capture the first two steps of a pipeline rank, and derive the traces of ranks with equal stages.

    Args:
        program: as lowered.
        world: number of ranks for which it was lowered.
        pp: ranks along the `pp` axis, which is the outermost.
        first: the simulated rank of coordinate 0.
        coordinate: of the simulated rank on the `pp` axis.
        others: coordinates of ranks that have equal stages in the same order; see
            :mod:`legoai.cost.pipelines.equal_stages`.
        kind: of device, which decides the kernels.
        gpu: the plan's device, whose properties a compiled program depends on; None where it is no GPU.

    Returns:
        The trace of the rank, followed by the traces of those other ranks, in order, that can be derived from it. The
        `stage` of each is its coordinate.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
    """
    rank, stride = first + coordinate * (world // pp), world // pp
    taken = _few_actions(program, world=world, rank=rank, kind=kind, gpu=gpu, others=others)
    if taken is None:
        return [capture(program, world=world, rank=rank, kind=kind, gpu=gpu, replay=False)]
    done, trace = taken
    found = [dataclasses.replace(trace, items=done.finished())]
    for other, items, translation in done.derived.others if done.derived else ():
        found.append(Trace(rank=first + other * stride, world=world, stage=other, items=items, translation=translation))
    return found


def _few_actions(
    program: Program | str | types.ModuleType | Trainer,
    *,
    world: int,
    rank: int,
    kind: Kind,
    gpu: CatalogueDevice | None,
    others: Sequence[int] = (),
    ways: Sequence[bool | None] = (None, True),
) -> tuple[_Captured, Trace] | None:
    """Capture a pipeline rank while executing few of its actions; None where actions of one class are unequal.

    ``ways`` are the values of ``freed`` to try (see :func:`_captured`). With True there are more classes of actions, so
    that more of them are executed. None chooses True where the first stage built reshards its parameters after forward;
    True itself is tried where that fails.
    """
    take = functools.partial(_captured, program, world=world, rank=rank, kind=kind, gpu=gpu, few=True, others=others)
    classes = program.block_classes if isinstance(program, Program) else ()
    for freed in ways:
        with contextlib.suppress(UnequalError):
            if classes:
                with contextlib.suppress(SimulationError, DepthError):  # the program may need all of its blocks
                    return take(containers=classes, freed=freed)
            return take(containers=(), freed=freed)
    return None


def _shortened(
    program: Program | str | types.ModuleType | Trainer,
    *,
    world: int,
    rank: int,
    kind: Kind,
    gpu: CatalogueDevice | None = None,
    containers: BlockClasses,
) -> Piece | Trace | None:
    """Capture few micro batches, and few blocks of some containers; None where they are not equal."""
    try:
        taken, trace = _captured(program, world=world, rank=rank, kind=kind, gpu=gpu, few=True, containers=containers)
    except (SimulationError, DepthError):
        if containers:
            return None  # the program may need all of its blocks
        raise
    if taken.staged:
        return dataclasses.replace(trace, items=taken.finished())
    with uncollected():
        piece = piece_of(taken.editable(), taken.runs, rank=rank, world=world, wanted=taken.wanted)
        if piece is not None and not piece.repeats:
            return dataclasses.replace(trace, items=taken.finished())
    return piece


@dataclasses.dataclass(slots=True)
class _Captured:
    """Result of running a program's steps on the simulated device.

    Attributes:
        recorder: of the steps.
        staged: whether the program is a pipeline, whose actions are recorded as instances of segments.
        wanted: micro batches of the program's full step; 0 for a pipeline, where they are not counted.
        runs: repeated blocks of which some were left out.
        derived: traces derived for a pipeline.
    """

    recorder: Capture
    staged: bool
    wanted: int
    runs: list[RepeatedBlocks]
    derived: DerivedTraces | None

    def editable(self) -> EditableTrace:
        """Return the records as an editable trace, on which they can be repeated."""
        records, operands = list(records_of(self.recorder.records)), self.recorder.operands or {}
        return EditableTrace.of(records, [operands.get(index) for index in range(len(records))])

    def finished(self) -> Sequence[Item]:
        """Return the records with their final numbers."""
        if self.derived is not None and self.derived.own:
            return self.derived.own
        segmented = any(isinstance(item, Instance) for item in self.recorder.records)
        return tuple(self.recorder.records) if segmented else self.editable().finished()


def _captured(
    program: Program | str | types.ModuleType | Trainer,
    *,
    world: int,
    rank: int,
    kind: Kind,
    gpu: CatalogueDevice | None = None,
    few: bool = False,
    freed: bool | None = None,
    containers: BlockClasses = (),
    others: Sequence[int] = (),
) -> tuple[_Captured, Trace]:
    """Run two steps on the simulated device; return what was recorded, and the trace without its records.

    ``few`` limits the micro batches, or executed actions, of the second step. ``freed`` is whether classes of pipeline
    actions depend on whether parameters are unsharded; None for whether they are resharded after forward.
    """
    capability = gpu.compute_capability if gpu is not None else None
    recorder = Capture(grouped_kernel=has_grouped_kernel(kind, gpu), kernels=(kind, capability))
    runs: list[RepeatedBlocks] = []
    simulated = simulated_device(recorder, rank=rank, world=world, kind=kind, capability=capability)
    with simulated as fake, recorder.errors():
        preparation = Preparation(recorder.kernels)
        trainer = _built_without_fake_tensors(trainer_of(program), kind, preparation)
        if containers and (trainer.pipeline is None or _may_be_short(trainer.pipeline)):
            ahead = program.look_ahead if isinstance(program, Program) else 1
            trainer = _with_few_blocks(trainer, runs, containers, ahead)
            recorder.operands = {}
        device = Device(type=SIM, holds_values=False)
        recorder.staged = trainer.pipeline is not None
        schedules: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        then: Callable[[], object] | None = None
        derived: DerivedTraces | None = None
        if recorder.staged:
            from legoai.cost.pipelines.stages import hooked, hooked_schedules

            pipeline = trainer.pipeline
            trainer, hooks = hooked(trainer, recorder, repeat=few, freed=freed)
            schedules = hooked_schedules(hooks)
            if (others or containers) and pipeline is not None:
                from legoai.cost.pipelines.deep_stages import DerivedTraces
                from legoai.cost.pipelines.other_ranks import equal_ranks

                derived, stride = DerivedTraces(), world // len(pipeline.stages_of_rank)
                own, *equal = equal_ranks(pipeline, rank // stride, [rank // stride, *others], stride=stride)
                then = functools.partial(derived.derive, hooks, runs, own, equal)
        with (
            host_memory(kind),
            compilation(recorder, kind, gpu),
            patched_attribute(of_trainer, "model_digest", lambda _: ""),  # used only for checkpoints
            attention_kernel(trainer.attention_kernel),
            compiled_run_eagerly(),
            schedules,
            fake,
        ):
            with preparation:
                training = trainer.prepare(device, seed=trainer.seed)
            casts = trainer.autocast_dtype is not None or may_autocast(training.model)
            with autocast_rules(kind) if casts else contextlib.nullcontext():
                wanted = _run_steps(recorder, trainer, training, device, few=few, then=then)
            stage = training.mesh.get_local_rank("pp") if "pp" in (training.mesh.mesh_dim_names or ()) else 0
            del training
    return _Captured(recorder, recorder.staged, wanted, runs, derived), Trace(
        rank=rank, world=world, stage=stage, items=()
    )


def _may_be_short(pipeline: Pipeline) -> bool:
    """Whether stages may be captured with few blocks: actions are repeated, and no block is a placeholder."""
    return pipeline.microbatches >= FEWEST and not pipeline.placeholders


def _with_few_blocks(trainer: Trainer, runs: list[RepeatedBlocks], containers: BlockClasses, ahead: int) -> Trainer:
    """Return a trainer that parallelizes its model, or its stages, with few of the repeated blocks.

    Args:
        trainer: of the program.
        runs: list to which the repeated blocks, of which some are left out, are appended.
        containers: the lists of blocks, each with the class of every block.
        ahead: blocks that a block looks ahead or back at most.
    """
    classes: dict[str, Mapping[str, int]] = {}

    def build_model() -> nn.Module:
        model = trainer.build_model()
        classes.update((path, class_of_name(model.get_submodule(path), of_block)) for path, of_block in containers)
        return model

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        held = {path: classes_of_held(model.get_submodule(path), of_name) for path, of_name in classes.items()}
        if trainer.pipeline is None:
            runs.extend(shorten(model, held, ahead=ahead))
        else:
            runs.extend(shorten(model, held, ahead=ahead, staged=True, least=_LEAST_LEFT_OUT))
        return trainer.parallelize(model, mesh)

    return dataclasses.replace(trainer, build_model=build_model, parallelize=parallelize)


def _built_without_fake_tensors(trainer: Trainer, kind: Kind, preparation: Preparation) -> Trainer:
    """Return a trainer that builds its mesh and its model on the meta device without fake tensors, which is faster."""

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with disable_current_modes():
                return function(*args)

        return call

    def build_model() -> nn.Module:
        with disable_current_modes():
            model = built_unfilled(trainer.build_model)
            cast_parameters(model, trainer.master_dtype)
            return model

    def build_graph(*args: Any) -> StepFunction:
        assert trainer.build_graph is not None, "a program that traces its step"
        with preparation.off(), collectives_as_traced(), on_simulated(kind):
            return trainer.build_graph(*args)

    def build_stage(*args: Any) -> PipelineStage:
        assert trainer.pipeline is not None, "a program with a pipeline"
        with preparation.off():  # the stage may be a graph, which is traced
            return trainer.pipeline.build_stage(*args)

    return dataclasses.replace(
        trainer,
        pipeline=None if trainer.pipeline is None else dataclasses.replace(trainer.pipeline, build_stage=build_stage),
        build_graph=None if trainer.build_graph is None else build_graph,
        build_model=build_model,
        build_mesh=outside(trainer.build_mesh),
    )


def _run_steps(
    recorder: Capture,
    trainer: Trainer,
    training: Training,
    device: Device,
    *,
    few: bool,
    then: Callable[[], object] | None,
) -> int:
    """Record the initial state and then the steps; call ``then`` after the last step.

    Returns:
        The micro batches of the program's full step; 0 for a pipeline.
    """
    recorder.mesh = training.mesh
    for part in training.parts:
        recorder.paths.update({id(module): plain_path(path) for path, module in part.named_modules()})
    if isinstance(training.graph, StepGraph):
        training.graph.on_node.append(recorder.at_node)
    recorder.adopt_state(training)
    training.control.on_gradients.append(lambda _: recorder.categorise_gradients(training))
    source = ValuelessSource(trainer, recorder.next_batch)
    batches = Batches(training, source)
    full = trainer.ramp[-1][0] if trainer.ramp else 0  # the first step of the full batch
    try:
        # Storages end with their last reference. When the cyclic collector would run depends on the process.
        with recorder.hooks(), Dispatch(recorder), uncollected():
            for index in range(STEPS):
                recorder.begin_step(index + 1)
                if not recorder.staged:
                    batches = FewBatches(training, source, most=1 if index == 0 else DISTINCT if few else None)
                take_step(trainer, training, batches, step=full + index)
                recorder.categorise_optimizer(training)
                device.synchronize()
                recorder.record(Mark(f"end step {index + 1}"))
                recorder.outside = "other"
            taken = len(recorder.records)
            if then is not None:
                then()
    finally:
        recorder.closed = True
    del recorder.records[taken:]  # ends of storages that `then` allocated without recording them
    return 0 if recorder.staged else batches.taken
