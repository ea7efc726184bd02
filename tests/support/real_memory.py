"""Active memory of a real step: the storages that live while a rank runs it on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from legoai.cost.memory.allocator import round_block
from legoai.runtime.batches import Batches
from legoai.runtime.device import Device
from legoai.runtime.kernels import attention_kernel
from legoai.runtime.step import take_step
from support.recorded import evenly_traced, flat
from support.simulated import Zeros


class LiveStorages(TorchDispatchMode):
    """Follows each storage that an operator returns until it is freed; blocks are rounded as CUDA's allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow the storages of tensors, and note how much lives now."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self._live[reference.cdata] = reference, round_block(storage.nbytes())
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            del self._live[key]
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.follow(flat(out))
        return out


def real_peak(text: str) -> int:
    """Take two steps of a program on this rank, and return the bytes that are active at the peak of the second."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer = evenly_traced(namespace["trainer"]())
    with attention_kernel(trainer.attention_kernel):
        training = trainer.prepare(Device(type="cpu"), seed=0)
        source = Zeros(trainer)
        batches = Batches(training, source)
        take_step(trainer, training, batches, step=0)
        with LiveStorages() as live:
            state = [flat(list(values.values())) for values in training.optimizer.state.values()]
            there = [*training.model.parameters(), *training.model.buffers(), *itertools.chain.from_iterable(state)]
            there += [source.batch.tokens, source.batch.targets]
            live.follow(item.to_local() if isinstance(item, DTensor) else item for item in there)
            take_step(trainer, training, batches, step=1)
    return live.peak
