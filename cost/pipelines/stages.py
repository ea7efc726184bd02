"""Hooks on torch's pipeline stages and schedules that mark each action in the trace.

Every action is recorded between `Mark("action 3F7")` and `Mark("end action 3F7")`, named as in
`torch.distributed.pipelining`: the stage, the kind (F, B, I for input gradients, W for weight gradients, UNSHARD,
RESHARD, REDUCE_GRAD) and the micro batch. The loss of a micro batch belongs to the last stage's F. Sends and receives
are recorded between the actions (:mod:`legoai.cost.pipelines.transfers`); an action waits for its inputs before its
mark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.order import compute_actions
from legoai.cost.pipelines.patterns import DepthError, Result
from legoai.cost.pipelines.transfers import SCHEDULES, STAGE, hooked_transfers, name_phases
from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.process import collectives_as_traced
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.marks import ACTION, END_ACTION
from legoai.cost.trace.records import EACH, Collective, Kernel, Mark, Phase
from legoai.lowering.graph.step.stage import StageModule
from legoai.runtime import Trainer
from legoai.runtime.loss import LossFunction
from legoai.runtime.parallelism.pipeline import PipelineSchedule
from legoai.runtime.torch_internals.distributed.pipelining import InferenceMode, PipelineScheduleRuntime
from legoai.runtime.torch_internals.distributed.units import freed_after_forward
from legoai.runtime.torch_internals.patching import override, patched

_SCHEDULE: Final = f"{SCHEDULES}:_PipelineSchedule"

_OF_PARAMETERS: Final = re.compile(r"(\d+)(UNSHARD|RESHARD)")


def hooked(
    trainer: Trainer, recorder: Capture, *, repeat: bool = False, freed: bool | None = None
) -> tuple[Trainer, PipelineHooks]:
    """Return the trainer with hooks on its pipeline's stages and schedule, and the hooks.

    Args:
        trainer: of the program.
        recorder: of the rank.
        repeat: whether only a few of equal actions are executed; see :mod:`legoai.cost.pipelines.actions`.
        freed: whether to assume that parameters are resharded after each forward, which makes fewer actions equal; None
            for whether those of the first stage that is built are.
    """
    pipeline = trainer.pipeline
    assert pipeline is not None, "a program with a pipeline"
    repeats = Repeats(recorder, pipeline.microbatches if repeat else 0, bool(freed))
    hooks = PipelineHooks(recorder, repeats)

    def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: Any) -> PipelineStage:
        with collectives_as_traced():
            stage = pipeline.build_stage(model, index, mesh, device)
        if isinstance(stage.submod, StageModule):
            if recorder.operands is not None:
                raise DepthError("the blocks of a graph overlap")
            stage.submod.on_node.append(recorder.at_node)
            stage.submod.on_sum.append(recorder.at_sum)
        _Stage(stage, recorder, repeats)
        if freed is None and not hooks.stages:
            repeats.freed = bool(freed_after_forward(stage.submod))
        if repeat:
            repeats.gradients.watch(index, stage.submod)
        hooks.stages.append(stage)
        return stage

    def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> PipelineSchedule:
        schedule = pipeline.build_schedule(stages, loss)
        if repeat:
            repeats.set_order(compute_actions(schedule))
        _hook_schedule(schedule, hooks)
        hooks.schedule = schedule
        return schedule

    listening = dataclasses.replace(pipeline, build_stage=build_stage, build_schedule=build_schedule)
    return dataclasses.replace(trainer, pipeline=listening), hooks


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """Indices of a pass among the records: its begin, the end of its stage preparation, and its end."""

    begin: int
    prepared: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A receive buffer of a stage.

    Attributes:
        info: receive info of torch's stage, which holds the buffer.
        number: of its storage.
        like: its description.
    """

    info: Any
    number: int
    like: Result


@dataclasses.dataclass(slots=True)
class PipelineHooks:
    """Hooks on the pipeline of one rank, and what they recorded.

    Attributes:
        recorder: of the rank.
        repeats: the executed actions and the replay of all others.
        stages: of this rank, ascending.
        schedule: of torch.
        prepared: index of the first record after the stages of the latest pass were prepared.
        passes: the passes so far.
        buffers: receive buffers of the stages, where few of their blocks are captured.
    """

    recorder: Capture
    repeats: Repeats
    stages: list[Any] = dataclasses.field(default_factory=list)
    schedule: Any = None
    prepared: int = 0
    passes: list[Pass] = dataclasses.field(default_factory=list)
    buffers: list[Buffer] = dataclasses.field(default_factory=list)

    def restore_buffers(self) -> None:
        """Give stages back the receive buffers of their first pass, where these were replaced.

        A stage replaces its buffer where an adjacent stage of the same rank passes it a tensor directly.
        """
        taken = len(self.recorder.records)
        for buffer in self.buffers:
            held = buffer.info.buffer
            if held is None or self.recorder.number_of(held) != buffer.number:
                buffer.info.buffer = self.repeats.tensor(buffer.like, ((buffer.number,), (), ()))
        del self.recorder.records[taken:]  # the replaced tensors end within a pass, where that is recorded


def _begin(recorder: Capture, name: str, phase: Phase) -> None:
    recorder.begin_action(phase)
    recorder.record(Mark(f"{ACTION}{name}"))


def _end(recorder: Capture, name: str) -> None:
    _settle(recorder)
    recorder.end_action()
    recorder.record(Mark(f"{END_ACTION}{name}"))


def _settle(recorder: Capture) -> None:
    """Count calls of the host that no operation of an action followed for its last one: none cross actions."""
    for place in range(len(recorder.records) - 1, -1, -1) if recorder.calls else ():
        last = recorder.records[place]
        if isinstance(last, Mark):
            return
        if isinstance(last, Kernel | Collective):
            counts = dict(last.calls)
            for call, number in recorder.calls.items():
                counts[call] = EACH if EACH in (number, counts.get(call)) else counts.get(call, 0) + number
            recorder.records[place] = dataclasses.replace(last, calls=tuple(sorted(counts.items())))
            recorder.calls.clear()
            return


class _Stage:
    """Overrides of the methods by which a schedule lets a stage compute.

    Args:
        stage: of torch.
        recorder: of the rank.
        repeats: decides which actions are executed.
    """

    def __init__(self, stage: Any, recorder: Capture, repeats: Repeats) -> None:
        self.stage, self.recorder, self.repeats, self.index = stage, recorder, repeats, stage.stage_index
        self.forward, self.backward = stage.forward_one_chunk, stage.backward_one_chunk
        self.weights, self.reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad
        override(stage, f"{STAGE}.forward_one_chunk", self.forward_one_chunk)
        override(stage, f"{STAGE}.backward_one_chunk", self.backward_one_chunk)
        override(stage, f"{STAGE}.backward_weight_one_chunk", self.backward_weight_one_chunk)
        override(stage, f"{STAGE}.perform_reduce_grad", self.perform_reduce_grad)
        name_phases(stage)

    def forward_one_chunk(self, micro_batch: int, args: tuple[Any, ...], *rest: Any, **kwargs: Any) -> Any:
        """Forward of one micro batch."""
        stage, repeats = self.stage, self.repeats
        action = (self.index, "F", micro_batch)
        _begin(self.recorder, f"{self.index}F{micro_batch}", "forward")
        start = len(self.recorder.records)
        if repeats.executes(self.index, micro_batch):
            repeats.unshard_or_reshard(self.index, stage.submod)
            output = self.forward(micro_batch, args, *rest, **kwargs)
            _settle(self.recorder)
            repeats.add_executed(action, start, stage.fwd_cache[micro_batch][0])
        else:
            outputs = tuple(repeats.replay(action, lambda: None))
            inputs = list(args) if stage.is_first else [item.buffer for item in stage.args_recv_info[micro_batch]]
            stage.fwd_cache[micro_batch] = (outputs, inputs)
            output = outputs[0] if len(outputs) == 1 else outputs
        if not stage.is_last:  # the last stage's F ends after its loss
            _end(self.recorder, f"{self.index}F{micro_batch}")
        return output

    def backward_one_chunk(
        self, micro_batch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro batch: full, or of the input only."""
        stage, repeats, kind = self.stage, self.repeats, "B" if full_backward else "I"
        action = (self.index, kind, micro_batch)
        name = f"{self.index}{kind}{micro_batch}"
        _begin(self.recorder, name, "backward")
        start = len(self.recorder.records)
        if repeats.executes(self.index, micro_batch):
            repeats.unshard_or_reshard(self.index, stage.submod)
            repeats.gradients.restore(self.index)
            self.backward(micro_batch, loss=loss, full_backward=full_backward, last_backward=last_backward)
            gradients = stage.bwd_cache[micro_batch]
            _settle(self.recorder)
            repeats.add_executed(action, start, gradients, self._on_buffers(micro_batch, gradients))
        else:
            held = [stage.fwd_cache.pop(micro_batch)]
            gradients = tuple(repeats.replay(action, held.clear))
            if full_backward:
                held.clear()
            else:  # the stage's outputs live until the weight gradients are computed
                stage.backward_state[micro_batch] = held
                stage.dw_runner[micro_batch] = None
            stage.bwd_cache[micro_batch] = gradients
            for place, on_buffer in enumerate(repeats.on_buffers(action)):
                if on_buffer:
                    stage.args_recv_info[micro_batch][place].buffer.grad = gradients[place]
        _end(self.recorder, name)

    def _on_buffers(self, micro_batch: int, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        """For each input, whether its gradient is the `.grad` of its receive buffer."""
        if self.stage.is_first:
            return ()
        buffers = [item.buffer for item in self.stage.args_recv_info[micro_batch]]
        return tuple(
            gradient is not None and buffer is not None and buffer.grad is gradient
            for buffer, gradient in zip(buffers, gradients, strict=False)
        )

    def backward_weight_one_chunk(self, micro_batch: int, last_backward: bool = False) -> None:
        """Weight gradients of one micro batch."""
        stage, repeats = self.stage, self.repeats
        action = (self.index, "W", micro_batch)
        name = f"{self.index}W{micro_batch}"
        _begin(self.recorder, name, "backward")
        start = len(self.recorder.records)
        if repeats.executes(self.index, micro_batch):
            repeats.gradients.restore(self.index)
            self.weights(micro_batch, last_backward=last_backward)
            _settle(self.recorder)
            repeats.add_executed(action, start, ())
        else:
            held = stage.backward_state.pop(micro_batch)
            repeats.replay(action, held.clear)
            held.clear()
        _end(self.recorder, name)

    def perform_reduce_grad(self, scale: int) -> None:
        """Gradient reduction after the last backward of a pass."""
        name = f"{self.index}REDUCE_GRAD"
        _begin(self.recorder, name, "backward")

        def reduce() -> None:
            self.reduce(scale)
            _settle(self.recorder)

        self.repeats.run_stage_action(self.index, "REDUCE_GRAD", reduce)
        _end(self.recorder, name)


def _hook_schedule(schedule: Any, hooks: PipelineHooks) -> None:
    """Hook the losses, which the schedule itself computes, and the begin and end of a pass."""
    recorder, repeats = hooks.recorder, hooks.repeats
    compute: Callable[..., None] = schedule._maybe_compute_loss
    step: Callable[..., Any] = schedule.step
    prepare: Callable[..., Any] = schedule._initialize_pp_stages

    @functools.wraps(step)
    def one_pass(*args: Any, **kwargs: Any) -> Any:
        repeats.begin_pass()
        recorder.begin_pass()
        begin = len(recorder.records)
        result = step(*args, **kwargs)
        hooks.passes.append(Pass(begin, hooks.prepared, len(recorder.records)))
        recorder.end_pass()
        return result

    @functools.wraps(prepare)
    def initialize_pp_stages(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        hooks.prepared = len(recorder.records)
        if recorder.operands is not None and not hooks.buffers:
            hooks.buffers = list(_buffers_of(hooks))
        return result

    @functools.wraps(compute)
    def maybe_compute_loss(stage: Any, output: Any, targets: Any, micro_batch: int, *args: Any) -> None:
        if not stage.is_last:
            return
        action, start = (stage.stage_index, "L", micro_batch), len(recorder.records)
        if repeats.executes(stage.stage_index, micro_batch):
            compute(stage, output, targets, micro_batch, *args)
            _settle(recorder)
            repeats.add_executed(action, start, schedule._internal_losses[-1:])
        else:
            schedule._internal_losses += repeats.replay(action, lambda: None)
        _end(recorder, f"{stage.stage_index}F{micro_batch}")

    override(schedule, f"{_SCHEDULE}._maybe_compute_loss", maybe_compute_loss)
    override(schedule, f"{_SCHEDULE}.step", one_pass)
    override(schedule, f"{_SCHEDULE}._initialize_pp_stages", initialize_pp_stages)
    if isinstance(schedule, PipelineScheduleRuntime):
        _hook_unshard_waits(schedule, repeats)


def _buffers_of(hooks: PipelineHooks) -> Iterator[Buffer]:
    """Yield the receive buffers of all stages."""
    for stage in hooks.stages:
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for info in received or ():
                buffer = getattr(info, "buffer", None)
                if buffer is not None and (number := hooks.recorder.number_of(buffer)) is not None:
                    like = Result(tuple(buffer.shape), buffer.stride(), buffer.dtype, None, 0, None)
                    yield Buffer(info, number, like)


def _hook_unshard_waits(schedule: Any, repeats: Repeats) -> None:
    """Record the wait for a stage's unsharded parameters as an action of its own."""
    perform: Callable[[Any], None] = schedule._assert_unsharded

    def assert_unsharded(stage: Any) -> None:
        if repeats.replays:
            if stage.stage_index in repeats.gathered:
                repeats.gathered.remove(stage.stage_index)
                repeats.replay_stage_action(stage.stage_index, "wait")
        elif stage.stage_index in schedule.unshard_ops:
            repeats.run_stage_action(stage.stage_index, "wait", lambda: perform(stage))
        else:
            perform(stage)

    override(schedule, f"{SCHEDULES}:_PipelineScheduleRuntime._assert_unsharded", assert_unsharded)


@contextlib.contextmanager
def hooked_schedules(hooks: PipelineHooks) -> Iterator[None]:
    """While entered, record actions on parameters, and let stages infer their shapes without communication.

    The stages of a real run vote whether all of them know the shapes that they exchange; the result of a vote is a
    value, and tensors of the simulated device have none.
    """

    @contextlib.contextmanager
    def region(name: str) -> Iterator[None]:
        action = name.removeprefix("PP:")
        of_parameters = _OF_PARAMETERS.fullmatch(action)
        if name == action or of_parameters is None:
            yield
            return
        recorder.record(Mark(f"{ACTION}{action}"))
        start = len(recorder.records)
        yield
        if not repeats.replays:
            repeats.record_stage_action(int(of_parameters[1]), of_parameters[2], start)
        recorder.record(Mark(f"{END_ACTION}{action}"))

    def warm_up(schedule: Any, stages: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise SimulationError(f"stage {stage.stage_index} does not state the shapes that it receives and sends")
            stage._inference_mode = InferenceMode.STATIC

    recorder, repeats = hooks.recorder, hooks.repeats
    with (
        patched(f"{SCHEDULES}:record_function", region),
        patched(f"{_SCHEDULE}._warmup_p2p", warm_up),
        hooked_transfers(recorder),
    ):
        yield
