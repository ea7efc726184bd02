"""What does one rank of a lowered program do in a step?

The program's own `trainer()` is built on the simulated device, and the trainer's own step is taken there. Nothing is
known here of models or plans: what is recorded is what the program dispatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from legoai.cost.autocast import autocast_rules
from legoai.cost.device import (
    SIM,
    Kind,
    SimulationError,
)
from legoai.cost.dispatch import Dispatch
from legoai.cost.host import host_memory
from legoai.cost.recorder import Capture
from legoai.cost.replay import MICRO_BATCH, renumber, repeat_micro_batches
from legoai.cost.simulation import simulated_device
from legoai.cost.trace import (
    Mark,
    Record,
    Trace,
)
from legoai.runtime import Trainer
from legoai.runtime.data import SequenceBatch
from legoai.runtime.device import Device
from legoai.runtime.initialize import cast_parameters, plain_path
from legoai.runtime.kernels import attention_kernel
from legoai.runtime.step import OptimizerStep, Training

STEPS: Final = 2
"""Optimizer steps that are taken: the first makes the optimizer's state, the second is like all that follow."""


_DISTINCT: Final = 5
"""Micro batches of a step that are taken: the first, the last, and three of those between, which are equal."""


def capture(
    program: str | types.ModuleType | Trainer, *, world: int, rank: int = 0, kind: Kind = "cuda", replay: bool = True
) -> Trace:
    """Take the first two steps of a lowered program on the simulated device.

    The trace begins with the allocation of what is there before the first step. `Mark("step 1")` and `Mark("step 2")`
    stand before the steps, `Mark("end step 2")` is the last record; in each step `micro batch N`, `forward PATH` and
    `end PATH` mark where its parts begin and end.

    Args:
        program: its text, or its module, or what its `trainer()` returns.
        world: number of ranks for which it was lowered.
        rank: the one that is simulated.
        kind: whose kernels the device has.
        replay: whether micro batches that are equal are taken only once and then repeated. The trace is the same.

    Raises:
        SimulationError: the program fails, or does what cannot be recorded.
    """
    if not 0 <= rank < world:
        raise ValueError(f"a world of {world} ranks has no rank {rank}")
    trace, wanted = _taken(program, world=world, rank=rank, kind=kind, most=_DISTINCT if replay else None)
    if wanted == len([None for record in trace.records if _is_micro_batch(record)]) // STEPS:
        return dataclasses.replace(trace, records=renumber(trace.records))
    repeated = repeat_micro_batches(trace.records, wanted=wanted)
    if repeated is None:
        return capture(program, world=world, rank=rank, kind=kind, replay=False)
    return dataclasses.replace(trace, records=repeated)


def _is_micro_batch(record: Record) -> bool:
    return isinstance(record, Mark) and record.name.startswith(MICRO_BATCH)


def _taken(
    program: str | types.ModuleType | Trainer, *, world: int, rank: int, kind: Kind, most: int | None
) -> tuple[Trace, int]:
    """Return the trace of steps with at most so many micro batches, and how many they have."""
    recorder = Capture()
    with simulated_device(recorder, rank=rank, world=world, kind=kind) as fake, recorder.errors():
        trainer = _outside_of_fake(_trainer_of(program))
        device = Device(type=SIM, holds_values=False)
        recorder.staged = trainer.pipeline is not None
        heard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if recorder.staged:
            from legoai.cost.stages import listened_to, schedules_heard

            trainer, heard = listened_to(trainer, recorder), schedules_heard(recorder)
        casts = contextlib.nullcontext() if trainer.autocast_dtype is None else autocast_rules(kind)
        with casts, host_memory(kind), attention_kernel(trainer.attention_kernel), heard, fake:
            training = trainer.prepare(device, seed=trainer.seed)
            wanted = 0 if recorder.staged else training.accumulation
            if most is not None and wanted:
                training = dataclasses.replace(training, accumulation=min(most, wanted))
            _refuse(training)
            _take_steps(recorder, trainer, training, device)
            stage = training.mesh.get_local_rank("pp") if "pp" in (training.mesh.mesh_dim_names or ()) else 0
            del training
    return Trace(rank=rank, world=world, stage=stage, records=tuple(recorder.records)), wanted


def _trainer_of(program: str | types.ModuleType | Trainer) -> Trainer:
    if isinstance(program, str):
        module = types.ModuleType("lowered_program")
        sys.modules[module.__name__] = module
        try:
            exec(compile(program, "<lowered program>", "exec"), module.__dict__)
        except SyntaxError as error:
            raise SimulationError(f"the program is no Python: {error}") from error
        program = module
    if isinstance(program, types.ModuleType):
        made = getattr(program, "trainer", None)
        if not callable(made):
            raise SimulationError("the program has no trainer()")
        program = made()
    if not isinstance(program, Trainer):
        raise SimulationError(f"trainer() returned {type(program).__name__}, not a Trainer")
    return program


def _outside_of_fake(trainer: Trainer) -> Trainer:
    """Let a program build its mesh and its model on the meta device without fake tensors, which is faster."""

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args)

        return call

    def build_model() -> nn.Module:
        with unset_fake_temporarily():
            model = trainer.build_model()
            cast_parameters(model, trainer.master_dtype)
            return model

    return dataclasses.replace(
        trainer,
        build_model=build_model,
        build_mesh=outside(trainer.build_mesh),
    )


def _refuse(training: Training) -> None:
    """Refuse what would be recorded wrongly."""
    for part in training.parts:
        for path, module in part.named_modules():
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                raise SimulationError(f"{plain_path(path) or 'the model'} is compiled, which is not captured")


def _take_steps(recorder: Capture, trainer: Trainer, training: Training, device: Device) -> None:
    """Record what is there, and then the steps."""
    recorder.mesh = training.mesh
    for part in training.parts:
        recorder.paths.update({id(module): plain_path(path) for path, module in part.named_modules()})
    recorder.adopt_state(training)
    step = OptimizerStep(trainer, training, device)
    batches = _Batches((trainer.micro_batch, trainer.seq_len), recorder.next_batch)
    try:
        with recorder.hooks(), Dispatch(recorder):
            for index in range(STEPS):
                recorder.begin_step(index + 1)
                gradient = step.gradient(index, batches, stop=False)
                recorder.categorise_gradients(training)
                step.update(gradient, step=index)
                recorder.categorise_optimizer(training)
                device.synchronize()
                recorder.record(Mark(f"end step {index + 1}"))
                recorder.outside = "other"
    finally:
        recorder.closed = True


class _Batches:
    """Micro batches without values."""

    def __init__(self, shape: tuple[int, int], on_next: Callable[[], None]) -> None:
        self.shape = shape
        self.on_next = on_next

    def next(self) -> SequenceBatch:
        """Return tokens and targets on the host."""
        self.on_next()
        return SequenceBatch(
            tokens=torch.zeros(self.shape, dtype=torch.int64), targets=torch.zeros(self.shape, dtype=torch.int64)
        )

    def skip(self, batches: int) -> None:
        """Read nothing."""
