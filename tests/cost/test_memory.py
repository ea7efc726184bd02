"""Active memory, against PyTorch's own trackers and against what the storages of a model must sum to."""

from __future__ import annotations

import contextlib

import pytest
import simulated
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from legoai.cost.capture import _Batches, _outside_of_fake
from legoai.cost.memory.storages import changes, memory, steps
from legoai.cost.simulated.autocast import autocast_rules
from legoai.cost.simulated.device import SIM, Recorder
from legoai.cost.simulated.process import simulated_device
from legoai.cost.trace.records import Allocate, Free, Mark, Resize, Trace
from legoai.runtime import Trainer
from legoai.runtime.device import Device
from legoai.runtime.step import OptimizerStep


class _Silent(Recorder):
    def record(self, record) -> None:
        pass


def tracked_peak(name: str) -> int:
    """Return the peak in bytes that PyTorch's tracker finds in the second step of a program."""
    return tracked_peak_of(simulated.trainer_of(name, micro_batches=1), world=simulated.world_of(name))


def tracked_peak_of(trainer: Trainer, *, world: int = 1) -> int:
    """Return the peak in bytes that PyTorch's tracker finds in the second step of a trainer."""
    trainer = _outside_of_fake(trainer)
    device = Device(type=SIM, holds_values=False)
    casts = contextlib.nullcontext() if trainer.autocast_dtype is None else autocast_rules("cuda")
    with simulated_device(_Silent(), rank=min(1, world - 1), world=world, kind="cuda") as fake, casts, fake:
        training = trainer.prepare(device, seed=0)
        step = OptimizerStep(trainer, training, device)
        batches = _Batches(trainer, lambda: None)
        step.update(step.gradient(0, batches, stop=False), step=0)
        if world > 1:
            tracker = FSDPMemTracker(training.model, training.optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(training.model, training.optimizer)
        with tracker:
            step.update(step.gradient(1, batches, stop=False), step=1)
        peaks = tracker.get_tracker_snapshot("peak")
        return max(value for place, found in peaks.items() if place.type == SIM for value in found.values())


def exact_peak(trace: Trace) -> int:
    """Return the peak of the second step in bytes that are not rounded."""
    span, sizes, peak = steps(trace)[-1], {}, 0
    for index, record in enumerate(trace.records[: span.stop]):
        if isinstance(record, Allocate | Resize):
            sizes[record.storage] = record.bytes
        elif isinstance(record, Free):
            del sizes[record.storage]
        if index >= span.start and isinstance(record, Allocate | Resize):
            peak = max(peak, sum(sizes.values()))
    return peak


@pytest.mark.parametrize("name", ["fsdp", "fsdp, checkpointed", "one device", "one device, checkpointed"])
def test_the_peak_is_that_of_torchs_tracker(name):
    trace = simulated.traced(name, micro_batches=1)
    assert exact_peak(trace) == simulated.in_a_fork(tracked_peak, name)


PARAMETERS = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 32 * 256 + 32


def test_a_step_begins_with_parameters_and_optimizer_state_and_leaves_no_more():
    trace = simulated.traced("one device")
    report = memory(trace)
    held = 3 * 4 * PARAMETERS
    table, counts = 2 * 64 * 4 * 8, 21 * 512
    assert held + table + counts <= report.start <= held + table + counts + 21 * 3 * 512
    assert list(changes(trace))[-1][1] == report.start


def test_categories_and_modules_sum_to_the_peak_and_name_what_they_hold():
    trace = simulated.traced("fsdp")
    report = memory(trace)
    assert sum(report.by_category.values()) == sum(report.by_module.values()) == report.peak
    assert sum(item.bytes for item in report.live) == report.peak
    assert report.peak == max(value for _, value in changes(trace)) == max(report.by_phase.values())
    assert report.by_category["optimizer_state"] >= 2 * report.by_category["sharded_parameter"]
    assert "activation" in report.by_category and "unsharded_parameter" in report.by_category


def test_checkpointing_trades_activations():
    whole, less = (memory(simulated.traced(name)) for name in ("one device", "one device, checkpointed"))
    assert less.peak < whole.peak
    assert less.by_phase["recompute"] > 0 and "recompute" not in whole.by_phase


def made(storage: int, size: int) -> Allocate:
    return Allocate(storage=storage, bytes=size, stream=0, category="activation", module="a", phase="forward")


def test_a_hand_made_step():
    records = (
        made(0, 100), Mark("step 1"), made(1, 1024), Resize(1, 0), made(2, 600), Free(2), Mark("end step 1"),
    )  # fmt: skip
    trace = Trace(rank=0, world=1, stage=0, records=records)
    report = memory(trace)
    assert (report.start, report.peak, report.peak_record) == (512, 1536, 2)
    assert list(changes(trace)) == [(1, 512), (2, 1536), (3, 512), (4, 1536), (5, 512)]


@pytest.mark.parametrize(
    ("records", "why"),
    [((Mark("step 1"),), "no end"), ((), "no step"), ((Mark("step 1"), Free(3), Mark("end step 1")), "storage 3")],
)
def test_what_is_no_trace_of_steps_is_refused(records, why):
    with pytest.raises(ValueError, match=why):
        memory(Trace(rank=0, world=1, stage=0, records=records))
