"""Active memory of a real step: the storages that live while a rank runs it on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from legoai.cost.simulated.recorder import locals_of
from legoai.runtime import Trainer
from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.state import Training
from legoai.runtime.training.step import take_step
from legoai.specs.allocator import round_block
from support.simulation.simulated import Zeros
from support.training.recorded import evenly_traced, flat
from support.training.watching import Watching


class LiveStorages(Watching):
    """Follows each storage that an operator returns until it is freed; blocks are rounded as CUDA's allocator does.

    A tensor wrapper, such as the result of a pending collective, has a storage without memory; the storage of the
    wrapped tensor is followed instead. FSDP frees storages by resizing them, which is no operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, StorageWeakRef] = {}

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow the storages of tensors, and note how much lives now."""
        for tensor in tensors:
            for local in locals_of(tensor):
                reference = StorageWeakRef(local.untyped_storage())
                self._live[reference.cdata] = reference
        active = 0
        for key, reference in list(self._live.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._live[key]
            else:
                active += round_block(storage.nbytes())
        self.peak = max(self.peak, active)

    def saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.follow(flat(out))


def real_peak(text: str) -> int:
    """Take two steps of a program on this rank, and return the bytes that are active at the peak of the second."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer = evenly_traced(namespace["trainer"]())
    return real_peak_of(trainer, Zeros(trainer))


def real_peak_of(trainer: Trainer, source: Any) -> int:
    """Take two steps of a trainer on this rank with the micro batch of a source, as `real_peak` does."""
    with attention_kernel(trainer.attention_kernel):
        training = trainer.prepare(Device(type="cpu"), seed=0)
        batches = Batches(training, source)
        take_step(trainer, training, batches, step=0)
        with LiveStorages() as live:
            live.follow(_kept(training))
            if training.staged is None:  # else the micro batches of a pass are copied into one tensor
                live.follow([*source.batch.inputs, source.batch.targets])
            take_step(trainer, training, batches, step=1)
    return live.peak


def _kept(training: Training) -> Iterator[torch.Tensor]:
    """Yield persistent tensors: parameters, buffers, optimizer state, and receive buffers of pipeline stages."""
    for part in training.parts:
        yield from part.parameters()
        yield from part.buffers()
    for values in training.optimizer.state.values():
        yield from flat(list(values.values()))
    if training.staged is None:
        return
    schedule: Any = training.schedule
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for item in received:
                if item.buffer is not None:
                    yield from (item.buffer, *flat([item.buffer.grad]))
