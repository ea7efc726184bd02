"""A simulated rank executes the same operators as a real one, and the same collectives in the same order."""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

from legoai.cost.capture import capture
from legoai.cost.simulated.device import SimulationError
from legoai.cost.trace.records import Collective, Copy, HostWaitDevice, HostWaitStream, Kernel, Mark, WaitWork
from legoai.cost.trace.trace import Trace
from legoai.runtime import chunked_cross_entropy, last_layer_cross_entropy
from support.marks import slow_but, some_slow
from support.simulation import simulated
from support.simulation.simulated import steady
from support.simulation.simulator import in_the_simulator


@pytest.fixture(scope="module")
def traced():
    """`traced(name)` is the trace of rank 1 of a program, or 0 where it is alone."""
    kept: dict[str, Trace] = {}

    def of(name: str) -> Trace:
        if name not in kept:
            kept[name] = simulated.traced(name, kind="cpu")
        return kept[name]

    return of


@pytest.mark.parametrize(
    "name",
    slow_but(simulated.PROGRAMS, "fsdp, reduced last"),
)
def test_kernels_and_collectives_equal_a_real_run(name, traced, gloo):
    world = simulated.world_of(name)
    kernels, collectives = gloo(world)(simulated.real_step, name)[min(1, world - 1)]
    records = steady(traced(name))
    found = [(item.kind, item.ranks, item.bytes) for item in records if isinstance(item, Collective)]
    assert found == collectives
    ops = [item.op for item in records if isinstance(item, Kernel) and item.op != "aten.scalar_tensor"]
    real = [op for op, _ in kernels if op != "aten.scalar_tensor"]
    if "fsdp" in name:  # gloo copies the result of a reduce-scatter out of a buffer of its own
        pairs = zip(["", *real], real, strict=False)
        real = [op for before, op in pairs if (before, op) != ("fsdp.chunk_cat", "aten.copy_")]
    assert "\n".join(difflib.unified_diff(real, ops, "real", "simulated", n=1, lineterm="")) == ""


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["fsdp", "fsdp and tensor parallel", "tensor and sequence parallel, hidden in backward"],
        "fsdp and tensor parallel",
    ),
)
def test_every_collective_is_waited_for_once(name, traced):
    records = steady(traced(name))
    works = [item.work for item in records if isinstance(item, Collective)]
    assert sorted(works) == sorted(item.work for item in records if isinstance(item, WaitWork))


def test_groups_have_the_names_of_mesh_axes(traced):
    found = {
        (item.axis, item.ranks) for item in steady(traced("fsdp and tensor parallel")) if isinstance(item, Collective)
    }
    assert found == {("dp_shard", (1, 3)), ("tp", (0, 1)), ("dp_shard+tp", (0, 1, 2, 3))}


def test_steps_micro_batches_and_modules_are_marked(traced):
    names = [item.name for item in steady(traced("one device")) if isinstance(item, Mark)]
    assert names[0] == "step 2" and names[-1] == "end step 2"
    assert [name for name in names if name.startswith("micro batch")] == [f"micro batch {index}" for index in range(4)]
    assert names.count("forward layers.0.attention.wq") == names.count("end layers.0.attention.wq") == 4


def test_phases_are_ordered_and_recomputation_is_distinguished(traced):
    records = [item for item in steady(traced("one device, checkpointed")) if isinstance(item, Kernel)]
    products = Counter(item.phase for item in records if item.op == "aten.mm")
    layers = 2 * 4 * 7  # layers, micro batches, matrices of a layer; the last of a layer is not needed again
    assert products == {"forward": layers + 4, "recompute": layers - 8, "backward": 2 * (layers + 4)}
    assert records[-1].phase == "optimizer" and records[-1].op == "aten._fused_adamw_"


def test_backward_kernels_belong_to_their_forward_module(traced):
    records = [item for item in steady(traced("fsdp")) if isinstance(item, Kernel) and item.op == "aten.mm"]
    by_module = {}
    for item in records:
        by_module.setdefault(item.module, []).append(item.phase)
    assert set(by_module.pop("output")) == {"forward", "backward"}
    assert len(by_module) == 2 * 7
    assert all(phases.count("backward") == 2 * phases.count("forward") for phases in by_module.values())


@pytest.mark.parametrize("name", ["one device", "fsdp", "fsdp, checkpointed"])
def test_loss_kernels_belong_to_the_loss_in_every_micro_batch(name, traced):
    records = [item for item in steady(traced(name)) if isinstance(item, Kernel) and item.op in LOSS_KERNELS]
    assert {(item.module, item.phase) for item in records} == {("loss", "forward"), ("loss", "backward")}
    first, *others = (
        [(item.op, item.phase) for item in records[at : at + 4]] for at in range(0, len(records), len(LOSS_KERNELS))
    )
    assert set(first) == {(op, "backward" if "backward" in op else "forward") for op in LOSS_KERNELS}
    assert others and all(other == first for other in others)
    embedding = [item for item in steady(traced(name)) if isinstance(item, Kernel) and item.module == "tok_embeddings"]
    assert all("embedding" in item.op for item in embedding if item.phase == "forward")
    assert not {item.op for item in embedding} & LOSS_KERNELS


LOSS_KERNELS = {
    "aten._log_softmax", "aten.nll_loss_forward", "aten.nll_loss_backward", "aten._log_softmax_backward_data",
}  # fmt: skip


def test_chunked_loss_is_recomputed():
    records = [item for item in steady(in_the_simulator(in_pieces)) if isinstance(item, Kernel)]
    phases = Counter(item.phase for item in records if item.op == "aten._log_softmax")
    assert phases == {"forward": 4 * 2, "recompute": 4 * 2}  # micro batches, pieces
    assert {item.module for item in records if item.op in LOSS_KERNELS} == {"loss"}


def test_gradients_of_a_last_layer_in_pieces_are_computed_before_the_blocks_backward():
    records = [item for item in steady(in_the_simulator(last_layer_in_pieces)) if isinstance(item, Kernel)]
    products = Counter((item.module, item.phase) for item in records if item.op == "aten.mm")
    assert products["output", "forward"] == 4 * 2  # micro batches, pieces
    assert products["output", "backward"] == 4 * 2 * 2
    assert "recompute" not in {item.phase for item in records}
    phases = [item.phase for item in records if item.op in LOSS_KERNELS][: 2 * len(LOSS_KERNELS)]
    assert phases == 2 * ["forward", "forward", "backward", "backward"]
    assert {item.module for item in records if item.op in LOSS_KERNELS} == {"loss"}
    assert {item.phase for item in records if item.module} == {"forward", "backward"}


def last_layer_in_pieces() -> Trace:
    whole = simulated.trainer_of("one device")
    return capture(replace(whole, build_model_loss=partial(last_layer_cross_entropy, path="output", pieces=2)), world=1)


def in_pieces() -> Trace:
    return capture(
        replace(simulated.trainer_of("one device"), build_loss=lambda: partial(chunked_cross_entropy, pieces=2)),
        world=1,
    )


def test_flops_equal_six_per_parameter_and_token(traced):
    """6 floating-point operations for each parameter of a matrix and token (Kaplan et al. 2020, section 2.1)."""
    records = [item for item in steady(traced("one device")) if isinstance(item, Kernel) and item.op == "aten.mm"]
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 256
    assert sum(item.flops for item in records) == 6 * matrices * 8 * 32


def test_bytes_are_read_and_written_once(traced):
    records = steady(traced("one device"))
    norm = next(item for item in records if isinstance(item, Kernel) and item.op == "aten.silu")
    assert (norm.bytes_read, norm.bytes_written) == (2 * 32 * 64 * 4, 2 * 32 * 64 * 4)
    update = next(item for item in records if isinstance(item, Kernel) and item.op == "aten._fused_adamw_")
    parameters = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 32 * 256 + 32
    assert update.bytes_written == 3 * 4 * parameters  # parameter and both moments
    assert update.bytes_read == 4 * 4 * parameters + 4 * 21  # the gradient too, and the counts of steps


def test_host_waits_once_for_the_loss_and_once_at_the_end(traced):
    records = steady(traced("one device"))
    assert sum(isinstance(item, HostWaitStream) for item in records) == 1
    assert sum(isinstance(item, HostWaitDevice) for item in records) == 1
    assert [item.bytes for item in records if isinstance(item, Copy) and item.direction == "device_to_host"] == [32]


def test_trace_is_deterministic(traced):
    again = simulated.traced("fsdp and tensor parallel", kind="cpu")
    assert again == traced("fsdp and tensor parallel")


def test_successive_simulations_leave_no_process_group():
    assert in_the_simulator(twice, "fsdp and tensor parallel") == (True, False)


def twice(name: str) -> tuple[bool, bool]:
    first, second = (capture(simulated.trainer_of(name), world=4, rank=1) for _ in range(2))
    return first == second, dist.is_initialized()


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["one device", "fsdp and tensor parallel, checkpointed", "fsdp, reduced last", "replicated"],
        "one device",
        "fsdp and tensor parallel, checkpointed",
        "replicated",
    ),
)
def test_replayed_micro_batches_equal_full_capture(name):
    whole = simulated.traced(name, micro_batches=8, replay=False)
    assert simulated.traced(name, micro_batches=8) == whole
    assert sum(isinstance(item, Mark) and item.name.startswith("micro batch") for item in whole.records) == 1 + 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = (", "not valid Python"),
        ("x = 1", r"no trainer\(\)"),
        ("def trainer(): return 1", "returned int"),
        ("def trainer(): raise KeyError('layers')", "KeyError"),
    ],
)
def test_invalid_program_is_refused(text, why):
    with pytest.raises(SimulationError, match=why):
        simulated.in_a_fork(capture, text, world=1)


def test_mesh_of_another_world_size_is_refused():
    with pytest.raises(SimulationError, match="needs 4 processes, and 2 were started"):
        simulated.in_a_fork(capture, simulated.trainer_of("fsdp and tensor parallel"), world=2)
