"""Which actions of a pipeline does a rank take, and when does each begin and end?

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
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode

from legoai.cost.device import SimulationError
from legoai.cost.marks import ACTION, BATCH, END_ACTION, END_BATCH
from legoai.cost.recorder import Capture
from legoai.cost.simulation import replaced
from legoai.cost.trace import Mark
from legoai.runtime import Trainer
from legoai.runtime.loss import LossFunction
from legoai.runtime.pipeline import PipelineSchedule

_OF_PARAMETERS: Final = ("UNSHARD", "RESHARD")


def listened_to(trainer: Trainer, recorder: Capture) -> Trainer:
    """Return the trainer with a pipeline whose stages and schedule tell the recorder of their actions."""
    pipeline = trainer.pipeline
    if pipeline is None:
        return trainer

    def build_stage(model: nn.Module, index: int, mesh: DeviceMesh, device: Any) -> PipelineStage:
        stage = pipeline.build_stage(model, index, mesh, device)
        _listen_to_stage(stage, recorder)
        return stage

    def build_schedule(stages: list[PipelineStage], loss: LossFunction) -> PipelineSchedule:
        schedule = pipeline.build_schedule(stages, loss)
        _listen_to_schedule(schedule, recorder)
        return schedule

    return dataclasses.replace(
        trainer, pipeline=dataclasses.replace(pipeline, build_stage=build_stage, build_schedule=build_schedule)
    )


def _begin(recorder: Capture, name: str) -> None:
    recorder.begin_action("forward" if "F" in name and "_" not in name else "backward")
    recorder.record(Mark(f"{ACTION}{name}"))


def _end(recorder: Capture, name: str) -> None:
    recorder.end_action()
    recorder.record(Mark(f"{END_ACTION}{name}"))


def _listen_to_stage(stage: Any, recorder: Capture) -> None:
    """Mark what the methods of a stage do; the schedules call nothing else of it that computes."""
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    weights, reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad

    @functools.wraps(forward)
    def forward_one_chunk(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        _begin(recorder, f"{stage.stage_index}F{micro_batch}")
        output = forward(micro_batch, *args, **kwargs)
        if not stage.is_last:  # else its loss is still to come
            _end(recorder, f"{stage.stage_index}F{micro_batch}")
        return output

    @functools.wraps(backward)
    def backward_one_chunk(micro_batch: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> None:
        name = f"{stage.stage_index}{'B' if full_backward else 'I'}{micro_batch}"
        _begin(recorder, name)
        backward(micro_batch, loss=loss, full_backward=full_backward, **kwargs)
        _end(recorder, name)

    @functools.wraps(weights)
    def backward_weight_one_chunk(micro_batch: int, **kwargs: Any) -> None:
        _begin(recorder, f"{stage.stage_index}W{micro_batch}")
        weights(micro_batch, **kwargs)
        _end(recorder, f"{stage.stage_index}W{micro_batch}")

    @functools.wraps(reduce)
    def perform_reduce_grad(scale: int) -> None:
        _begin(recorder, f"{stage.stage_index}REDUCE_GRAD")
        reduce(scale)
        _end(recorder, f"{stage.stage_index}REDUCE_GRAD")

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
    stage.backward_weight_one_chunk, stage.perform_reduce_grad = backward_weight_one_chunk, perform_reduce_grad


def _listen_to_schedule(schedule: Any, recorder: Capture) -> None:
    """Mark what the schedule itself computes, the losses, and hear when a pass ends."""
    compute: Callable[..., None] = schedule._maybe_compute_loss
    step: Callable[..., Any] = schedule.step

    @functools.wraps(step)
    def one_pass(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        recorder.end_pass()
        return result

    @functools.wraps(compute)
    def maybe_compute_loss(stage: Any, output: Any, targets: Any, micro_batch: int, *args: Any) -> None:
        compute(stage, output, targets, micro_batch, *args)
        if stage.is_last:
            _end(recorder, f"{stage.stage_index}F{micro_batch}")

    schedule._maybe_compute_loss, schedule.step = maybe_compute_loss, one_pass


@contextlib.contextmanager
def schedules_heard(recorder: Capture) -> Iterator[None]:
    """While entered, hear of actions on parameters, and let stages agree on their shapes without asking each other.

    The stages of a real run vote whether all of them know what they send and receive; a vote has a value, which the
    simulated device has not.
    """

    @contextlib.contextmanager
    def region(name: str) -> Iterator[None]:
        action = name.removeprefix("PP:")
        if name == action or not action.endswith(_OF_PARAMETERS):
            yield
            return
        recorder.record(Mark(f"{ACTION}{action}"))
        yield
        recorder.record(Mark(f"{END_ACTION}{action}"))

    def in_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        recorder.record(Mark(BATCH))
        works = batch(operations)
        recorder.record(Mark(END_BATCH))
        return works

    def warm_up(schedule: Any, stages: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise SimulationError(f"stage {stage.stage_index} does not say the shapes that it receives and sends")
            stage._inference_mode = InferenceMode.STATIC

    batch = dist.batch_isend_irecv
    with (
        replaced(schedules, "record_function", region),
        replaced(schedules._PipelineSchedule, "_warmup_p2p", warm_up),
        replaced(dist, "batch_isend_irecv", in_batch),
    ):
        yield
