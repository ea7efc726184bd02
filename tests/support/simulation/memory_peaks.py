"""Peak memory of a program's second step: as torch's trackers find it, and exact, from a trace."""

from __future__ import annotations

import contextlib

from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from legoai.cost.capture import _built_without_fake_tensors
from legoai.cost.simulated.device import SIM, Recorder
from legoai.cost.simulated.few_batches import ValuelessSource
from legoai.cost.simulated.operators.autocast import autocast_rules
from legoai.cost.simulated.preparation import Preparation
from legoai.cost.simulated.process import simulated_device
from legoai.cost.trace.records import Allocate, Free, Resize
from legoai.cost.trace.trace import Trace
from legoai.runtime import Trainer
from legoai.runtime.device import Device
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from support.simulation import simulated


class _Silent(Recorder):
    def record(self, record) -> None:
        pass


def tracked_peak(name: str) -> int:
    """Return the peak in bytes that PyTorch's tracker finds in the second step of a program."""
    return tracked_peak_of(simulated.trainer_of(name, micro_batches=1), world=simulated.world_of(name))


def tracked_peak_of(trainer: Trainer, *, world: int = 1) -> int:
    """Return the peak in bytes that PyTorch's tracker finds in the second step of a trainer."""
    trainer = _built_without_fake_tensors(trainer, "cuda", Preparation(None))
    device = Device(type=SIM, holds_values=False)
    casts = contextlib.nullcontext() if trainer.autocast_dtype is None else autocast_rules("cuda")
    with simulated_device(_Silent(), rank=min(1, world - 1), world=world, kind="cuda") as fake, casts, fake:
        training = trainer.prepare(device, seed=0)
        batches = Batches(training, ValuelessSource(trainer, lambda: None))
        take_step(trainer, training, batches, step=0)
        if world > 1:
            tracker = FSDPMemTracker(training.model, training.optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(training.model, training.optimizer)
        with tracker:
            take_step(trainer, training, batches, step=1)
        peaks = tracker.get_tracker_snapshot("peak")
        return max(value for place, found in peaks.items() if place.type == SIM for value in found.values())


def exact_peak(trace: Trace) -> int:
    """Return the peak of the second step in bytes that are not rounded."""
    span, sizes, peak = trace.steps[-1], {}, 0
    for index, record in enumerate(trace.records[: span.stop]):
        if isinstance(record, Allocate | Resize):
            sizes[record.storage] = record.bytes
        elif isinstance(record, Free):
            del sizes[record.storage]
        if index >= span.start and isinstance(record, Allocate | Resize):
            peak = max(peak, sum(sizes.values()))
    return peak
