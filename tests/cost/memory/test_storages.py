"""Active memory, against PyTorch's own trackers and against the sum of a model's storages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Allocate, Free, Mark, Resize
from legoai.cost.trace.trace import Trace
from legoai.specs.allocator import round_block
from support.marks import some_slow
from support.simulation import simulated
from support.simulation.memory_peaks import exact_peak, tracked_peak
from support.simulation.simulator import in_the_simulator


def changes(trace: Trace, *, step: int = -1) -> Iterator[tuple[int, int]]:
    """Yield the active bytes when a step begins, and after each change of them.

    Args:
        trace: of one rank, from the setup on.
        step: index of the step.

    Yields:
        The index of a record of the trace, and bytes.
    """
    span = trace.steps[step]
    sizes: dict[int, int] = {}
    active = 0
    for index, record in enumerate(itertools.islice(trace.records, span.stop)):
        if isinstance(record, Allocate | Free | Resize):
            size = 0 if isinstance(record, Free) else round_block(record.bytes)
            active += size - sizes.pop(record.storage, 0)
            sizes[record.storage] = size
        elif index != span.start:
            continue
        if index >= span.start:
            yield index, active


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["fsdp", "fsdp, checkpointed", "one device", "one device, checkpointed"],
        "fsdp",
        "one device",
        "one device, checkpointed",
    ),
)
def test_peak_equals_the_torch_memory_tracker(name):
    trace = simulated.traced(name, micro_batches=1)
    assert exact_peak(trace) == in_the_simulator(tracked_peak, name)


PARAMETERS = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 32 * 256 + 32


def test_step_starts_and_ends_with_parameters_and_optimizer_state():
    trace = simulated.traced("one device")
    report = memory(trace)
    held = 3 * 4 * PARAMETERS
    table, counts = 2 * 64 * 4 * 8, 21 * 512
    assert held + table + counts <= report.start <= held + table + counts + 21 * 3 * 512
    assert list(changes(trace))[-1][1] == report.start


def test_categories_and_modules_sum_to_the_peak():
    trace = simulated.traced("fsdp")
    report = memory(trace)
    assert sum(report.by_category.values()) == sum(report.by_module.values()) == report.peak
    assert sum(item.bytes for item in report.live) == report.peak
    assert report.peak == max(value for _, value in changes(trace)) == max(report.by_phase.values())
    assert report.by_category["optimizer_state"] >= 2 * report.by_category["sharded_parameter"]
    assert "activation" in report.by_category and "unsharded_parameter" in report.by_category


def test_checkpointing_lowers_the_peak():
    whole, less = (memory(simulated.traced(name)) for name in ("one device", "one device, checkpointed"))
    assert less.peak < whole.peak
    assert less.by_phase["recompute"] > 0 and "recompute" not in whole.by_phase


def made(storage: int, size: int) -> Allocate:
    return Allocate(storage=storage, bytes=size, stream=0, category="activation", module="a", phase="forward")


def test_hand_written_records_give_the_expected_changes():
    records = (
        made(0, 100), Mark("step 1"), made(1, 1024), Resize(1, 0), made(2, 600), Free(2), Mark("end step 1"),
    )  # fmt: skip
    trace = Trace(rank=0, world=1, stage=0, items=records)
    report = memory(trace)
    assert (report.start, report.peak, report.peak_record) == (512, 1536, 2)
    assert list(changes(trace)) == [(1, 512), (2, 1536), (3, 512), (4, 1536), (5, 512)]


@pytest.mark.parametrize(
    ("records", "why"),
    [((Mark("step 1"),), "no end"), ((), "no step"), ((Mark("step 1"), Free(3), Mark("end step 1")), "storage 3")],
)
def test_invalid_step_trace_is_refused(records, why):
    with pytest.raises(ValueError, match=why):
        memory(Trace(rank=0, world=1, stage=0, items=records))


SHARDED_STATE = """\
plan test
model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 4, micro = 2, seq_len = 32)
mesh    (dp_replicate = 2)
replicate on dp_replicate (optimizer = sharded)
"""


def categories(path: Path) -> dict[str, int]:
    import legoai

    return dict(legoai.estimate(path).ranks[0].memory.by_category)


def test_parameters_that_are_gathered_in_place_stay_parameters(tmp_path: Path):
    path = tmp_path / "sharded.plan"
    path.write_text(SHARDED_STATE, encoding="utf-8")
    found = in_the_simulator(categories, path)
    assert "communication" not in found
    assert found["sharded_parameter"] > 0
