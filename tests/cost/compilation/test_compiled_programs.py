"""Programs with compiled blocks: fewer kernels than in eager, with the same results and communication."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter

import pytest
import torch

from legoai.cost.capture import capture
from legoai.cost.compilation import graphs, inductor  # noqa: F401 (imported once, before the processes that need it)
from legoai.cost.simulated.device import SimulationError
from legoai.cost.trace.records import Allocate, Collective, Free, HostKernel, Kernel
from legoai.cost.trace.trace import Trace
from legoai.runtime import keep_outputs, wait_for_output
from legoai.runtime.device import Device
from legoai.runtime.loss import token_cross_entropy
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from legoai.specs.cluster import device
from support.simulation import simulated
from support.simulation.simulated import steady
from support.training import programs


def trainer(*, backend: str | None = "inductor", checkpoint: str = "none", micro_batches: int = 1, **options):
    """A program whose blocks are compiled, before they are checkpointed as a whole or after operators are chosen."""
    ranks = options.get("dp_shard", 1)
    made = programs.trainer(dtype=torch.float32, global_batch=2 * ranks * micro_batches, **options)

    def parallelize(model, mesh):
        if options.get("tp", 1) > 1:
            programs.apply_tensor_parallel(model, mesh["tp"])
            if backend is not None:
                wait_for_output(model.tok_embeddings)
        for name, layer in model.layers.items():
            inner = layer
            if checkpoint == "selective":
                keep = keep_outputs("matmul")
                inner = model.layers[name] = programs.checkpoint_wrapper(layer, context_fn=keep)
            if backend is not None:
                inner.compile(backend=backend, fullgraph=True, dynamic=False)
            if checkpoint == "full":
                model.layers[name] = programs.checkpoint_wrapper(layer)
        if ranks > 1:
            programs.apply_fsdp(model, mesh["dp_shard"])
        return model

    return dataclasses.replace(made, parallelize=parallelize)


@functools.cache
def traced(kind: str = "cuda", replay: bool = False, **options) -> Trace:
    world = options.get("dp_shard", 1) * options.get("tp", 1)
    return simulated.in_a_fork(_traced, kind, replay, world, options)


def _traced(kind: str, replay: bool, world: int, options) -> Trace:
    return capture(trainer(**options), world=world, kind=kind, gpu=device("h100_sxm"), replay=replay)


def kernels(trace: Trace) -> list[Kernel]:
    return [item for item in steady(trace) if isinstance(item, Kernel)]


def test_compilation_fuses_all_but_products_and_attention():
    eager, compiled = kernels(traced(backend=None)), kernels(traced())
    libraries = ("aten.mm", "attention")

    def by_library(items: list[Kernel]) -> Counter:
        return Counter(
            (item.op, item.phase, item.flops) for item in items if any(name in item.op for name in libraries)
        )

    assert by_library(compiled) == by_library(eager)
    assert len(compiled) < 0.6 * len(eager)
    moved = [
        sum(item.bytes_read + item.bytes_written for item in items if "layers" in item.module and "mm" not in item.op)
        for items in (compiled, eager)
    ]
    assert moved[0] < 0.6 * moved[1]


def test_elementwise_chain_reads_and_writes_each_tensor_once():
    """`silu(a) * b` with its casts, over (2, 32, 64) numbers of 4 bytes: two are read, and one is written."""
    found = [
        item for item in kernels(traced())
        if item.op.startswith("fused") and item.module == "layers.0.feed_forward" and item.phase == "forward"
    ]  # fmt: skip
    size = 2 * 32 * programs.HIDDEN * 4
    assert [(item.bytes_read, item.bytes_written) for item in found] == [(2 * size, size)]


def test_every_allocation_of_a_step_is_freed_in_it():
    records = steady(traced())
    assert sum(isinstance(item, Allocate) for item in records) == sum(isinstance(item, Free) for item in records)


def test_equal_blocks_are_compiled_once():
    assert simulated.in_a_fork(_count_graphs) == 1


def _count_graphs() -> int:
    traced_graphs = []
    original = graphs.Graph.trace

    def trace(graph, *args):
        traced_graphs.append(graph)
        return original(graph, *args)

    graphs.Graph.trace = trace
    capture(trainer(backend="aot_eager"), world=1)
    return len(traced_graphs)


@pytest.mark.slow
def test_aot_eager_fuses_nothing():
    eager, compiled = kernels(traced(backend=None)), kernels(traced(backend="aot_eager"))
    assert Counter(item.op for item in eager if item.flops) == Counter(item.op for item in compiled if item.flops)
    assert not any(item.op.startswith("fused") for item in compiled)


@pytest.mark.parametrize("options", [{}, {"dp_shard": 2}], ids=["one device", "fsdp"])
@pytest.mark.slow
def test_replayed_micro_batches_equal_full_capture(options):
    assert traced(replay=True, micro_batches=6, **options) == traced(replay=False, micro_batches=6, **options)


@pytest.mark.slow
def test_checkpoint_around_a_compiled_module_recomputes_its_forward():
    plain, whole = kernels(traced()), kernels(traced(checkpoint="full"))

    def of(items: list[Kernel], phase: str) -> Counter:
        return Counter(item.op for item in items if item.phase == phase and item.module.startswith("layers"))

    assert of(whole, "forward") == of(plain, "forward")
    assert of(whole, "recompute") == of(plain, "forward")
    assert of(whole, "backward") == of(plain, "backward")


@pytest.mark.slow
def test_selective_checkpoint_inside_a_compiled_module_saves_its_operators():
    plain, chosen = kernels(traced()), kernels(traced(checkpoint="selective"))

    def count(items: list[Kernel], phase: str, name: str) -> int:
        return sum(item.phase == phase and name in item.op for item in items)

    assert count(chosen, "backward", "aten.mm") == count(plain, "backward", "aten.mm")
    attention = "_scaled_dot_product_efficient_attention"
    assert count(plain, "backward", attention) == 2  # its backward in each of two layers
    assert count(chosen, "backward", attention) == 4  # and the attention itself again


@pytest.mark.slow
def test_collectives_of_a_compiled_program_equal_a_real_run(gloo):
    options = {"dp_shard": 2, "tp": 2}
    real = gloo(4)(real_collectives, options)[0]
    found = [
        (item.kind, item.ranks, item.bytes) for item in steady(traced("cpu", **options)) if isinstance(item, Collective)
    ]
    assert found == real


class SeenInside(simulated.Seen):
    """Sees the operators of compiled graphs that are run one by one."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def real_collectives(options) -> list[tuple[str, tuple[int, ...], int]]:
    """The collectives of a second step that really runs, its graphs compiled by inductor's partition alone."""
    made = trainer(backend="aot_eager_decomp_partition", **options)
    device = Device(type="cpu")
    training = made.prepare(device, seed=0)
    batches = Batches(training, simulated.Zeros(made))
    take_step(made, training, batches, step=0)
    with SeenInside() as seen:
        take_step(made, training, batches, step=1)
    return seen.collectives


def test_pending_collective_into_a_compiled_module_is_refused():
    with pytest.raises(SimulationError, match="nothing has waited for"):
        simulated.in_a_fork(_unwaited)


def _unwaited() -> None:
    made = programs.trainer(tp=2, dtype=torch.float32, global_batch=2)

    def parallelize(model, mesh):
        programs.apply_tensor_parallel(model, mesh["tp"])
        model.layers["0"].compile(backend="aot_eager")
        return model

    capture(dataclasses.replace(made, parallelize=parallelize), world=2, gpu=device("h100_sxm"))


def _largest_loss(*, fused: bool) -> tuple[int, int]:
    """Number of kernels that read all logits, and bytes of fp32 tensors of their size."""
    made = programs.trainer(dtype=torch.bfloat16, global_batch=2)
    if fused:
        made = dataclasses.replace(made, build_loss=lambda: torch.compile(token_cross_entropy, fullgraph=True))
    records = steady(capture(made, world=1, kind="cuda", gpu=device("h100_sxm")))
    logits = 2 * made.seq_len * programs.VOCABULARY
    kernels = [
        item for item in records if isinstance(item, Kernel) and item.module == "loss" and item.phase == "forward"
    ]
    reads = sum(any(math.prod(kind.shape) == logits for kind in item.inputs) for item in kernels)
    return reads, sum(item.bytes for item in records if isinstance(item, Allocate) and item.bytes == 4 * logits)


@pytest.mark.slow
def test_fused_loss_reads_logits_twice_without_an_fp32_copy():
    """As inductor compiles it: one pass for the largest and the sum, one for the loss; eager casts them first."""
    reads, copies = simulated.in_a_fork(_largest_loss, fused=True)
    assert (reads, copies) == (2, 0)
    assert simulated.in_a_fork(_largest_loss, fused=False)[1] > 0


CONTEXT_PARALLEL = """plan small

model llama3("tiny", max_seq_len = 64)
cluster h100_sxm
batch (global = 4, micro = 1, seq_len = 64)
mesh (dp_shard = 4, cp = 2)
fsdp on dp_shard, cp { layers.* = unit, root = unit }
context on cp (rotate = allgather, balance = head_tail)
checkpoint { layers.* = full }
attention flash
compile { layers.* = inductor }
"""


def _host_kernels_of_context_parallel(folder) -> int:
    from legoai.api import lower

    (folder / "small.plan").write_text(CONTEXT_PARALLEL)
    trace = capture(lower(folder / "small.plan").text, world=8, gpu=device("h100_sxm"))
    assert sum(isinstance(item, Kernel) for item in trace.records) > 100
    return sum(isinstance(item, HostKernel) for item in trace.records)


@pytest.mark.slow
def test_lazy_backward_compilation_records_no_operators(tmp_path):
    """PyTorch compiles the backward of a graph with a collective at its first call."""
    assert simulated.in_a_fork(_host_kernels_of_context_parallel, tmp_path) == 0
