"""Actions of a pipeline's rank, as marks in its trace.

The schedule is torch's own. Its stages and its schedule are only listened to: every action that computes is put between
`Mark("action 3F7")` and `Mark("end action 3F7")`, named as `torch.distributed.pipelining` names it: the stage, what is
done (F, B, I for the gradient of the input, W for those of the weights, UNSHARD, RESHARD, REDUCE_GRAD) and the micro
batch. The loss of a micro batch belongs to the last stage's F. Sends and receives stand between the actions, as records
of their own; waiting for what an action needs comes before its mark. Those that torch issues as one batch, which NCCL
runs as one operation, stand between `Mark("batch")` and `Mark("end batch")`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from legoai.cost.pipelines.actions import Repeats
from legoai.cost.pipelines.order import computing
from legoai.cost.pipelines.patterns import DepthError, Result
from legoai.cost.simulated.device import SimulationError, backend, current_stream
from legoai.cost.simulated.operators import type_of
from legoai.cost.simulated.process import collectives_as_traced
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.trace.records import Collective, Mark, Phase, WaitWork
from legoai.lowering.graph.stage import StageModule
from legoai.runtime import Trainer
from legoai.runtime.loss import LossFunction
from legoai.runtime.pipeline import PipelineSchedule
from legoai.runtime.torch_internals.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.patching import original, override, patched
from legoai.runtime.torch_internals.pipelining import InferenceMode, PipelineScheduleRuntime
from legoai.runtime.torch_internals.units import freed_after_forward

_SCHEDULES: Final = "torch.distributed.pipelining.schedules"
_SCHEDULE: Final = f"{_SCHEDULES}:_PipelineSchedule"
_STAGE: Final = "torch.distributed.pipelining.stage:_PipelineStageBase"

_OF_PARAMETERS: Final = re.compile(r"(\d+)(UNSHARD|RESHARD)")


def listened_to(
    trainer: Trainer, recorder: Capture, *, repeat: bool = False, freed: bool | None = None
) -> tuple[Trainer, Heard]:
    """Return the trainer with a pipeline whose stages and schedule tell the recorder of their actions.

    Args:
        trainer: of the program.
        recorder: is told.
        repeat: whether actions that are equal are run only a few times; see :mod:`legoai.cost.pipelines.actions`.
        freed: whether parameters are taken to be freed after each forward, so that fewer actions are equal; None where
            those of the first stage that is built are.
    """
    pipeline = trainer.pipeline
    assert pipeline is not None, "a program with a pipeline"
    repeats = Repeats(recorder, pipeline.microbatches if repeat else 0, bool(freed))
    heard = Heard(recorder, repeats)

    def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: Any) -> PipelineStage:
        with collectives_as_traced():
            stage = pipeline.build_stage(model, index, mesh, device)
        if isinstance(stage.submod, StageModule):
            if recorder.operands is not None:
                raise DepthError("the blocks of a graph overlap")
            stage.submod.on_node.append(recorder.at_node)
            stage.submod.on_sum.append(recorder.at_sum)
        _Stage(stage, recorder, repeats)
        if freed is None and not heard.stages:
            repeats.freed = bool(freed_after_forward(stage.submod))
        if repeat:
            repeats.gradients.watch(index, stage.submod)
        heard.stages.append(stage)
        return stage

    def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> PipelineSchedule:
        schedule = pipeline.build_schedule(stages, loss)
        if repeat:
            repeats.follow(computing(schedule))
        _listen_to_schedule(schedule, heard)
        heard.schedule = schedule
        return schedule

    listening = dataclasses.replace(pipeline, build_stage=build_stage, build_schedule=build_schedule)
    return dataclasses.replace(trainer, pipeline=listening), heard


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """Where a pass is among the records: where it begins, where its stages are prepared, and where it ends."""

    begin: int
    prepared: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer in which a stage receives, unless the stage before or behind it is of the same rank and hands it on.

    Attributes:
        info: of torch's stage, which holds the buffer.
        number: of its storage.
        like: what it is like.
    """

    info: Any
    number: int
    like: Result


@dataclasses.dataclass(slots=True)
class Heard:
    """What is heard of a pipeline.

    Attributes:
        recorder: is told.
        repeats: the actions that were run.
        stages: of this rank, ascending.
        schedule: of torch.
        prepared: where the stages of the latest pass were prepared.
        passes: those that were taken.
        buffers: that stages were given to receive in, where few of their blocks are captured.
    """

    recorder: Capture
    repeats: Repeats
    stages: list[Any] = dataclasses.field(default_factory=list)
    schedule: Any = None
    prepared: int = 0
    passes: list[Pass] = dataclasses.field(default_factory=list)
    buffers: list[Buffer] = dataclasses.field(default_factory=list)

    def restore_buffers(self) -> None:
        """Give stages the buffers that they were given before their first pass, where they have others."""
        taken = len(self.recorder.records)
        for buffer in self.buffers:
            held = buffer.info.buffer
            if held is None or self.recorder.number_of(held) != buffer.number:
                buffer.info.buffer = self.repeats.tensor(buffer.like, ((buffer.number,), (), ()))
        del self.recorder.records[taken:]  # what they have ends as it does in a pass


def _begin(recorder: Capture, name: str, phase: Phase) -> None:
    recorder.begin_action(phase)
    recorder.record(Mark(f"{ACTION}{name}"))


def _end(recorder: Capture, name: str) -> None:
    recorder.end_action()
    recorder.record(Mark(f"{END_ACTION}{name}"))


class _Stage:
    """Puts itself in the place of those methods of a stage that compute; a schedule calls no others.

    Args:
        stage: of torch.
        recorder: is told.
        repeats: decides what is run.
    """

    def __init__(self, stage: Any, recorder: Capture, repeats: Repeats) -> None:
        self.stage, self.recorder, self.repeats, self.index = stage, recorder, repeats, stage.stage_index
        self.forward, self.backward = stage.forward_one_chunk, stage.backward_one_chunk
        self.weights, self.reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad
        override(stage, f"{_STAGE}.forward_one_chunk", self.forward_one_chunk)
        override(stage, f"{_STAGE}.backward_one_chunk", self.backward_one_chunk)
        override(stage, f"{_STAGE}.backward_weight_one_chunk", self.backward_weight_one_chunk)
        override(stage, f"{_STAGE}.perform_reduce_grad", self.perform_reduce_grad)

    def forward_one_chunk(self, micro_batch: int, args: tuple[Any, ...], *rest: Any, **kwargs: Any) -> Any:
        """Forward of one micro batch."""
        stage, repeats = self.stage, self.repeats
        action = (self.index, "F", micro_batch)
        _begin(self.recorder, f"{self.index}F{micro_batch}", "forward")
        start = len(self.recorder.records)
        if repeats.runs(self.index, micro_batch):
            repeats.gather_or_free(self.index, stage.submod)
            output = self.forward(micro_batch, args, *rest, **kwargs)
            repeats.ran(action, start, stage.fwd_cache[micro_batch][0])
        else:
            outputs = tuple(repeats.write(action, lambda: None))
            inputs = list(args) if stage.is_first else [item.buffer for item in stage.args_recv_info[micro_batch]]
            stage.fwd_cache[micro_batch] = (outputs, inputs)
            output = outputs[0] if len(outputs) == 1 else outputs
        if not stage.is_last:  # else its loss is still to come
            _end(self.recorder, f"{self.index}F{micro_batch}")
        return output

    def backward_one_chunk(
        self, micro_batch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro batch, of all or of the input alone."""
        stage, repeats, kind = self.stage, self.repeats, "B" if full_backward else "I"
        action = (self.index, kind, micro_batch)
        name = f"{self.index}{kind}{micro_batch}"
        _begin(self.recorder, name, "backward")
        start = len(self.recorder.records)
        if repeats.runs(self.index, micro_batch):
            repeats.gather_or_free(self.index, stage.submod)
            repeats.gradients.put_back(self.index)
            self.backward(micro_batch, loss=loss, full_backward=full_backward, last_backward=last_backward)
            gradients = stage.bwd_cache[micro_batch]
            repeats.ran(action, start, gradients, self._on_buffers(micro_batch, gradients))
        else:
            held = [stage.fwd_cache.pop(micro_batch)]
            gradients = tuple(repeats.write(action, held.clear))
            if full_backward:
                held.clear()
            else:  # what the stage returned lives on where the gradients of the weights need it
                stage.backward_state[micro_batch] = held
                stage.dw_runner[micro_batch] = None
            stage.bwd_cache[micro_batch] = gradients
            for place, on_buffer in enumerate(repeats.on_buffers(action)):
                if on_buffer:
                    stage.args_recv_info[micro_batch][place].buffer.grad = gradients[place]
        _end(self.recorder, name)

    def _on_buffers(self, micro_batch: int, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        """For each input, whether its gradient is kept as that of the buffer in which it was received."""
        if self.stage.is_first:
            return ()
        buffers = [item.buffer for item in self.stage.args_recv_info[micro_batch]]
        return tuple(
            gradient is not None and buffer is not None and buffer.grad is gradient
            for buffer, gradient in zip(buffers, gradients, strict=False)
        )

    def backward_weight_one_chunk(self, micro_batch: int, last_backward: bool = False) -> None:
        """The gradients of the weights of one micro batch."""
        stage, repeats = self.stage, self.repeats
        action = (self.index, "W", micro_batch)
        name = f"{self.index}W{micro_batch}"
        _begin(self.recorder, name, "backward")
        start = len(self.recorder.records)
        if repeats.runs(self.index, micro_batch):
            repeats.gradients.put_back(self.index)
            self.weights(micro_batch, last_backward=last_backward)
            repeats.ran(action, start, ())
        else:
            held = stage.backward_state.pop(micro_batch)
            repeats.write(action, held.clear)
            held.clear()
        _end(self.recorder, name)

    def perform_reduce_grad(self, scale: int) -> None:
        """What follows the last backward of a pass."""
        name = f"{self.index}REDUCE_GRAD"
        _begin(self.recorder, name, "backward")
        self.repeats.by_itself(self.index, "REDUCE_GRAD", lambda: self.reduce(scale))
        _end(self.recorder, name)


def _listen_to_schedule(schedule: Any, heard: Heard) -> None:
    """Mark what the schedule itself computes, the losses, and hear when a pass begins and ends."""
    recorder, repeats = heard.recorder, heard.repeats
    compute: Callable[..., None] = schedule._maybe_compute_loss
    step: Callable[..., Any] = schedule.step
    prepare: Callable[..., Any] = schedule._initialize_pp_stages

    @functools.wraps(step)
    def one_pass(*args: Any, **kwargs: Any) -> Any:
        repeats.begin_pass()
        recorder.begin_pass()
        begin = len(recorder.records)
        result = step(*args, **kwargs)
        heard.passes.append(Pass(begin, heard.prepared, len(recorder.records)))
        recorder.end_pass()
        return result

    @functools.wraps(prepare)
    def initialize_pp_stages(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        heard.prepared = len(recorder.records)
        if recorder.operands is not None and not heard.buffers:
            heard.buffers = list(_buffers_of(heard))
        return result

    @functools.wraps(compute)
    def maybe_compute_loss(stage: Any, output: Any, targets: Any, micro_batch: int, *args: Any) -> None:
        if not stage.is_last:
            return
        action, start = (stage.stage_index, "L", micro_batch), len(recorder.records)
        if repeats.runs(stage.stage_index, micro_batch):
            compute(stage, output, targets, micro_batch, *args)
            repeats.ran(action, start, schedule._internal_losses[-1:])
        else:
            schedule._internal_losses += repeats.write(action, lambda: None)
        _end(recorder, f"{stage.stage_index}F{micro_batch}")

    override(schedule, f"{_SCHEDULE}._maybe_compute_loss", maybe_compute_loss)
    override(schedule, f"{_SCHEDULE}.step", one_pass)
    override(schedule, f"{_SCHEDULE}._initialize_pp_stages", initialize_pp_stages)
    if isinstance(schedule, PipelineScheduleRuntime):
        _listen_to_parameters(schedule, repeats)


def _buffers_of(heard: Heard) -> Iterator[Buffer]:
    """Yield the buffers of all stages in which they receive."""
    for stage in heard.stages:
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for info in received or ():
                buffer = getattr(info, "buffer", None)
                if buffer is not None and (number := heard.recorder.number_of(buffer)) is not None:
                    like = Result(tuple(buffer.shape), buffer.stride(), buffer.dtype, None, 0, None)
                    yield Buffer(info, number, like)


def _listen_to_parameters(schedule: Any, repeats: Repeats) -> None:
    """Let the wait for a stage's unsharded parameters be recorded by itself."""
    perform: Callable[[Any], None] = schedule._assert_unsharded

    def assert_unsharded(stage: Any) -> None:
        if repeats.replays:
            if stage.stage_index in repeats.gathered:
                repeats.gathered.remove(stage.stage_index)
                repeats.again(stage.stage_index, "wait")
        elif stage.stage_index in schedule.unshard_ops:
            repeats.by_itself(stage.stage_index, "wait", lambda: perform(stage))
        else:
            perform(stage)

    override(schedule, f"{_SCHEDULES}:_PipelineScheduleRuntime._assert_unsharded", assert_unsharded)


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    """A send or receive for which the schedule can wait.

    Attributes:
        work: its number.
        tensor: what is sent or received, which lives as long as this does: torch's schedules keep the works of sends
            until they wait for them where a step ends. Gloo's work holds the tensor (`SendWork::tensor_` in
            `ProcessGroupGloo.hpp`), and so does that of NCCL (`ProcessGroupNCCL::pointToPoint` puts it into `outputs_`
            of a work that is not of a batch).
    """

    work: int
    tensor: torch.Tensor

    def wait(self) -> bool:
        """Let the stream wait for it."""
        backend.tell(WaitWork(current_stream(), self.work))
        return True


def _transferred(recorder: Capture, operation: Any) -> _Transfer:
    """Record a send or receive, without the way through all modes that a call of `dist.isend` takes."""
    tensor = operation.tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    recorder.locate()
    members, axis = recorder.group(operation.group.group_name)
    here, there = dist.get_rank(), members[operation.group_peer]
    sends = operation.op is dist.isend
    work = recorder.work_count
    recorder.work_count += 1
    recorder.record(
        Collective(
            work=work,
            stream=current_stream(),
            kind="send" if sends else "receive",
            ranks=(here, there) if sends else (there, here),
            axis=axis,
            bytes=tensor.numel() * tensor.itemsize,
            dtype=type_of(tensor).dtype,
            module=recorder.module,
            phase=recorder.phase,
            python=recorder.python,
        )
    )
    return _Transfer(work, tensor)


@contextlib.contextmanager
def schedules_heard(heard: Heard) -> Iterator[None]:
    """While entered, hear of actions on parameters, and let stages agree on their shapes without asking each other.

    The stages of a real run vote whether all of them know what they send and receive; a vote has a value, which the
    simulated device has not.
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
            repeats.keep(int(of_parameters[1]), of_parameters[2], start)
        recorder.record(Mark(f"{END_ACTION}{action}"))

    def in_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        recorder.record(Mark(BATCH))
        works = batch(operations)
        recorder.record(Mark(END_BATCH))
        return works

    def in_order(operations: list[dist.P2POp], desc: str | None = None) -> Any:
        if len({operation.op for operation in operations}) != 1:
            return batched(operations, desc)
        return [_transferred(recorder, operation) for operation in operations]

    def warm_up(schedule: Any, stages: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise SimulationError(f"stage {stage.stage_index} does not say the shapes that it receives and sends")
            stage._inference_mode = InferenceMode.STATIC

    recorder, repeats = heard.recorder, heard.repeats
    batch, batched = dist.batch_isend_irecv, original(f"{_SCHEDULES}:_batch_p2p")
    with (
        patched(f"{_SCHEDULES}:record_function", region),
        patched(f"{_SCHEDULE}._warmup_p2p", warm_up),
        patched("torch.distributed:batch_isend_irecv", in_batch),
        patched(f"{_SCHEDULES}:_batch_p2p", in_order),
    ):
        yield
