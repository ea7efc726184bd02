"""Tensors offloaded to host memory are not on the device, and every copy between the two is recorded."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.operators.properties import operator
from legoai.cost.timing.engine import simulate
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.records import Copy, HostKernel, HostWaitEvent, Kernel
from legoai.cost.trace.trace import Trace
from legoai.runtime.offloading.offload import offload_activations, offload_optimizer_state
from support.simulation.simulated import steady
from support.simulation.simulator import in_the_simulator
from support.training import programs

MATRICES = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 2 * 32 * 256
PARAMETERS = MATRICES + 5 * 32
SHARD = PARAMETERS // 2


def trainer(what: str, micro_batches: int):
    made = programs.trainer(dp_shard=2, dtype=torch.float32, global_batch=4 * micro_batches)

    def parallelize(model, mesh):
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        if what == "parameters":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp_shard"], **options)
        fully_shard(model, mesh=mesh["dp_shard"], **options)
        if what == "activations":
            offload_activations(model)
        return model

    build = made.build_optimizer
    if what == "optimizer":
        made = dataclasses.replace(made, build_optimizer=lambda groups: offload_optimizer_state(build(groups)))
    return dataclasses.replace(made, parallelize=parallelize, offload_parameters=what == "parameters")


@functools.cache
def traced(what: str, kind: str = "cuda", micro_batches: int = 1) -> Trace:
    return in_the_simulator(_traced, what, kind, micro_batches)


def _traced(what: str, kind: str, micro_batches: int) -> Trace:
    return capture(trainer(what, micro_batches), world=2, kind=kind)


def copied(trace: Trace, direction: str) -> int:
    return sum(item.bytes for item in steady(trace) if isinstance(item, Copy) and item.direction == direction)


def test_offloaded_parameters_and_their_state_leave_the_device():
    kept, offloaded = memory(traced("nothing")), memory(traced("parameters"))
    assert not {"sharded_parameter", "optimizer_state", "sharded_gradient"} & set(offloaded.by_category)
    # Between steps: fp32 shards and two moments of Adam, each a block of at least 512 bytes.
    assert kept.start - offloaded.start >= 3 * 4 * SHARD


def test_shards_are_copied_per_gather_and_gradients_per_reduction():
    trace = traced("parameters")
    layers = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) // 2
    # Layers are gathered for forward and again for backward; the root unit stays gathered.
    arrives = 4 * (SHARD + layers)
    inputs = 2 * 2 * 32 * 8
    table = copied(trace, "host_to_device") - arrives - inputs
    assert 0 <= table <= 64
    assert copied(trace, "device_to_host") - 4 * SHARD in (4 * 8, 4 * 8 + 4)  # and four numbers of all ranks


def test_gradient_copies_are_asynchronous_until_needed():
    records = steady(traced("parameters"))
    gradients = [item for item in records if isinstance(item, Copy) and item.direction == "device_to_host"][:-1]
    assert not any(item.blocking for item in gradients)
    assert sum(isinstance(item, HostWaitEvent) for item in records) == len(gradients)


def test_host_gradient_accumulation_waits_for_its_copies():
    records = steady(traced("parameters", micro_batches=2))
    gradients = [item for item in records if isinstance(item, Copy) and item.direction == "device_to_host"][:-1]
    blocking = Counter(item.blocking for item in gradients)
    assert blocking[True] == blocking[False] == len(gradients) // 2
    adds = [item for item in records if isinstance(item, HostKernel) and item.op == "aten.add_"]
    assert sum(item.bytes_written for item in adds) == 4 * SHARD


def test_host_updates_offloaded_parameters():
    records = steady(traced("parameters"))
    updates = [item for item in records if isinstance(item, HostKernel) and item.phase == "optimizer"]
    adam = [item for item in updates if item.op == "aten._fused_adamw_"]
    assert sum(item.bytes_written for item in adam) == 3 * 4 * SHARD
    assert not any(isinstance(item, Kernel) and "adam" in item.op for item in records)


def test_offloaded_optimizer_state_is_on_the_device_for_the_step_only():
    trace = traced("optimizer")
    assert copied(trace, "host_to_device") >= 2 * 4 * SHARD
    assert copied(trace, "device_to_host") >= 2 * 4 * SHARD
    kept, offloaded = memory(traced("nothing")), memory(trace)
    assert kept.start - offloaded.start >= 2 * 4 * SHARD


def test_offloaded_activations_are_copied_out_and_back():
    trace = traced("activations")
    there, back = copied(trace, "device_to_host"), copied(trace, "host_to_device")
    assert back - there <= 2 * 2 * 32 * 8 + 64 and there > 0
    assert memory(trace).peak < memory(traced("nothing")).peak


def test_cpu_offload_copies_nothing():
    assert copied(traced("activations", "cpu"), "device_to_host") == 4 * 8
    assert copied(traced("optimizer", "cpu"), "device_to_host") == 4 * 8


def test_host_kernels_block_the_host_and_overlap_the_device():
    common = {"outputs": (), "flops": 0, "bytes_read": 0, "bytes_written": 0, "attributes": {}, "module": ""}
    kernel = Kernel(stream=0, op="aten.mm", inputs=(), phase="backward", **common)
    work = HostKernel(op="aten._fused_adamw_", inputs=(), phase="optimizer", **common)

    def cost(record) -> Cost:
        if isinstance(record, HostKernel):
            return Cost(seconds=2.0, resource="host", model="given")
        return Cost(seconds=5.0, resource="compute", model="given")

    def end(*records) -> float:
        return simulate(Trace(rank=0, world=1, stage=0, items=records), cost, Host()).end

    assert end(kernel, work) == pytest.approx(5.0)  # the device computes meanwhile
    assert end(work, kernel) == pytest.approx(7.0)  # the kernel is dispatched after it
    assert end(kernel, work, work, work) == pytest.approx(6.0)


def test_record_stream_is_refused():
    with pytest.raises(SimulationError, match="record_stream"):
        operator(torch.ops.aten.record_stream.default)
