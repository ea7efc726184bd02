"""Measurement of a lowered program on this machine: step time, and bytes of tensors.

The measurement does not use the simulator. Memory is that of storages, which are tracked by weak references: all that
exist when the measurement begins, and every one that an operator returns. After each operator the sizes of all live
storages are added up, so that storages resized by FSDP count with their current size.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.data.sequences import SequenceBatch
from legoai.runtime.device import Device
from legoai.runtime.launching.torchrun import threads_per_process
from legoai.runtime.torch_internals.operators import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step

WARM_UP = 2
MEMORY_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """Measured times and memory of one rank.

    Attributes:
        seconds: seconds of each measured step.
        peak: peak of storage bytes in a step after the first; the minimum over several steps, because gloo's threads
            hold buffers for a while after a collective, longer on a busy machine.
        held: bytes of storages when that step begins.
        kernels: seconds of each operator by its name in one more step, on this thread, if requested.
    """

    seconds: tuple[float, ...]
    peak: int
    held: int
    kernels: dict[str, float]

    @property
    def median(self) -> float:
        """Median step time in seconds; NaN where none was measured."""
        return statistics.median(self.seconds) if self.seconds else math.nan


class Storages(TorchDispatchMode):
    """Tracks the live storages and the peak of their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                self.note(item)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the operators that the subclass itself calls arrive here too
        out = func(*args, **(kwargs or {}))
        for item in _tensors(out):
            self.note(item)
        self.peak = max(self.peak, self.bytes)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        """Follow the storages of a tensor; a wrapper has those of the tensors in it."""
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                inner = getattr(tensor, name)
                if isinstance(inner, torch.Tensor):
                    self.note(inner)
        elif tensor.device.type != "meta" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.alive:
                self.alive[key] = weakref.ref(storage, lambda _: self.alive.pop(key, None))

    @property
    def bytes(self) -> int:
        """Bytes of all live storages."""
        found = (ref() for ref in list(self.alive.values()))
        return sum(storage.nbytes() for storage in found if storage is not None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class RandomBatches:
    """Micro batches of random tokens, made before the measurement."""

    def __init__(self, shape: tuple[int, int], vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1), generator=generator)
        self.batch = SequenceBatch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())

    def next(self) -> SequenceBatch:
        """Return the same batch each time."""
        return self.batch

    def skip(self, batches: int) -> None:
        """Nothing is read."""


def run_rank(rank: int, /, *, world: int, store: str, text: str, steps: int, profiled: bool, answers: Any) -> None:
    """Run one rank of a program, and put (rank, :class:`Real`) on the queue."""
    # One thread suffices for memory, and disturbs no other process.
    torch.set_num_threads(threads_per_process(world) if steps else 1)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer, device = namespace["trainer"](), Device(type="cpu")
    device.activate()
    with attention_kernel(trainer.attention_kernel):
        training = trainer.prepare(device, seed=0)
        source = RandomBatches((trainer.micro_batch, trainer.seq_len), 4096, rank)
        taken = 0

        def take() -> float:
            nonlocal taken
            begin = time.perf_counter()
            take_step(trainer, training, Batches(training, source), step=taken)
            taken += 1
            return time.perf_counter() - begin

        take()
        with Storages() as storages:
            held, peaks = storages.bytes, []
            for _ in range(MEMORY_STEPS):
                storages.peak = 0
                take()
                peaks.append(storages.peak)
        for _ in range(WARM_UP if steps else 0):
            take()
        seconds = tuple(take() for _ in range(steps))
        kernels = _profile(take) if profiled else {}
    answers.put((rank, Real(seconds=seconds, peak=min(peaks), held=held, kernels=kernels)))
    dist.barrier()
    dist.destroy_process_group()


def _profile(take: Any) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        take()
    return {item.key: item.self_cpu_time_total / 1e6 for item in seen.key_averages()}


def run_program(text: str, *, world: int, steps: int, profiled: bool = False) -> list[Real]:
    """Run a program's steps in `world` processes, and return each rank's measurement.

    Raises:
        RuntimeError: a rank failed; it has printed why.
    """
    context = torch.multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        options = {"store": str(Path(folder) / "store"), "text": text, "steps": steps, "profiled": profiled}
        ranks = [
            context.Process(target=run_rank, args=(rank,), kwargs={"world": world, "answers": answers, **options})
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found = _gathered(ranks, answers)
        for process in ranks:
            process.join()
    return [found[rank] for rank in range(world)]


def _gathered(ranks: list[Any], answers: Any) -> dict[int, Real]:
    found: dict[int, Real] = {}
    while len(found) < len(ranks):
        if not answers.empty():
            rank, real = answers.get()
            found[rank] = real
        elif any(process.exitcode not in (None, 0) for process in ranks):
            for process in ranks:
                process.kill()
            raise RuntimeError("a rank failed")
        else:
            time.sleep(0.02)
    return found
