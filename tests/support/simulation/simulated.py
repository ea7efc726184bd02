"""Small lowered programs for the simulator's tests, and their counterparts that really run."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from legoai.cost.capture import capture
from legoai.cost.compilation.modules import compilation
from legoai.cost.simulated.operators.properties import operator
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Record
from legoai.cost.trace.trace import Trace
from legoai.runtime import Trainer
from legoai.runtime.data.sequences import SequenceBatch
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from legoai.specs.cluster import device
from support.simulation.simulator import in_the_simulator
from support.training import programs
from support.training.watching import Watching

PROGRAMS = {
    "one device": {},
    "one device, checkpointed": {"checkpoint": True},
    "fsdp": {"dp_shard": 2},
    "fsdp, checkpointed": {"dp_shard": 2, "checkpoint": True},
    "tensor and sequence parallel": {"tp": 2},
    "tensor and sequence parallel, hidden in backward": {"tp": 2, "overlap": True},
    "tensor parallel": {"tp": 2, "sequence_parallel": False},
    "fsdp and tensor parallel": {"dp_shard": 2, "tp": 2},
    "fsdp and tensor parallel, checkpointed": {"dp_shard": 2, "tp": 2, "checkpoint": True},
    "replicated": {"replicate": 2},
    "fsdp, reduced last": {"dp_shard": 2, "reduce_last": True},
}


def steady(trace: Trace) -> list[Record]:
    """The records of the last step."""
    span = trace.steps[-1]
    return list(trace.records[span.start : span.stop])


@contextmanager
def compiling(recorder: Capture, kind: str = "cuda") -> Iterator[None]:
    """A simulated device, a CPU or an H100, on which tensors are created and modules compiled."""
    gpu = device("h100_sxm") if kind == "cuda" else None
    with (
        simulated_device(recorder, rank=0, world=1, kind=kind) as fake,
        compilation(recorder, kind, gpu),
        fake,
        torch.device("sim"),
    ):
        yield


def in_a_fork(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a forked process, and return its result or raise its error.

    Backward on the simulated device starts autograd's device threads, after which a process can be forked no more, as
    the pool of gloo ranks is.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, args, kwargs), daemon=True)
    process.start()
    theirs.close()
    try:
        done, value = ours.recv() if ours.poll(280) else (False, TimeoutError("no answer within 280 s"))
    finally:
        process.kill()
        process.join()
    if not done:
        raise value
    return value


def _answer(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    # OpenMP's threads of the parent, if a test before computed with several, are missing here: it would wait for them.
    torch.set_num_threads(1)
    gc.freeze()  # cyclic garbage of other tests may need threads that are missing here
    try:
        pipe.send((True, function(*args, **kwargs)))
    except BaseException as error:
        pipe.send((False, type(error)(str(error)) if isinstance(error, ValueError | RuntimeError) else error))


def traced(name: str, **options: Any) -> Trace:
    """Return the trace of rank 1 of a program, or of rank 0 where it is alone."""
    world = world_of(name)
    return in_the_simulator(_capture, name, world=world, rank=min(1, world - 1), **options)


def _capture(name: str, *, micro_batches: int | None = None, **options: Any) -> Trace:
    return capture(trainer_of(name, micro_batches=micro_batches), **options)


def world_of(name: str) -> int:
    program = PROGRAMS[name]
    return program.get("dp_shard", 1) * program.get("tp", 1) * program.get("replicate", 1)


def trainer_of(name: str, *, micro_batches: int | None = None) -> Trainer:
    """Return the trainer of a program, in fp32, with a global batch of 8 or of some micro batches of each rank."""
    arguments = dict(PROGRAMS[name])
    replicas = arguments.pop("replicate", 1)
    ranks = arguments.get("dp_shard", 1) * replicas
    batch = 8 if micro_batches is None else 2 * ranks * micro_batches
    trainer = programs.trainer(dtype=torch.float32, global_batch=batch, replicas=replicas, **arguments)
    if replicas == 1:
        return trainer
    from torch.distributed._composable.replicate_with_fsdp import replicate

    def parallelize(model, mesh):
        for layer in model.layers.values():
            replicate(layer, mesh=mesh["dp_replicate"])
        replicate(model, mesh=mesh["dp_replicate"])
        return model

    return dataclasses.replace(
        trainer,
        build_mesh=lambda kind: init_device_mesh(kind, (replicas,), mesh_dim_names=("dp_replicate",)),
        parallelize=parallelize,
        data_axes=("dp_replicate",),
    )


class Zeros:
    """Micro batches of token 0, created before the recording."""

    def __init__(self, trainer: Trainer) -> None:
        shape = trainer.micro_batch, trainer.seq_len
        self.batch = SequenceBatch(
            tokens=torch.zeros(shape, dtype=torch.int64), targets=torch.zeros(shape, dtype=torch.int64)
        )

    def next(self) -> SequenceBatch:
        return self.batch

    def skip(self, batches: int) -> None:
        pass


class Seen(Watching):
    """Notes the operators that a real step calls on plain tensors, and the collectives that it issues."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.collectives: list[tuple[str, tuple[int, ...], int]] = []

    def saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        known = operator(func)
        if known.collective is not None:
            self.collectives.append(collective_of(func, args, out))
        elif known.treatment in ("kernel", "copy") and "profiler" not in known.name:
            shapes = tuple(tuple(item.shape) for item in flat(args))
            self.kernels.append((known.name, shapes))


def flat(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for item in value for found in flat(item)] if isinstance(value, list | tuple) else []


def collective_of(func, args, out) -> tuple[str, tuple[int, ...], int]:
    """Return kind, ranks and the larger of input and output, which is the whole buffer."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    schema = func._schema
    kind = next(
        kind
        for part, kind in (
            ("scatter", "reduce_scatter"), ("allgather", "all_gather"), ("all_gather", "all_gather"),
            ("alltoall", "all_to_all"), ("all_to_all", "all_to_all"), ("reduce", "all_reduce"),
            ("broadcast", "broadcast"),
        )
        if part in schema.name
    )  # fmt: skip
    place = next(index for index, item in enumerate(schema.arguments) if item.name in ("process_group", "group_name"))
    group = args[place]
    group = _resolve_process_group(group) if isinstance(group, str) else ProcessGroup.unbox(group)
    sizes = [sum(item.nbytes for item in flat(value)) for value in (*args, out)]
    return kind, tuple(dist.get_process_group_ranks(group)), max(sizes)


def real_step(name: str, *, rank_device: str = "cpu") -> tuple[list, list]:
    """Take two steps on this process, and return the kernels and collectives of the second."""
    trainer = trainer_of(name)
    device = Device(type=rank_device)
    training = trainer.prepare(device, seed=0)
    batches = Batches(training, Zeros(trainer))
    take_step(trainer, training, batches, step=0)
    with Seen() as seen:
        take_step(trainer, training, batches, step=1)
    return seen.kernels, seen.collectives
