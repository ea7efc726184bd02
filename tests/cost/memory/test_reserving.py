"""Memory of a rank on its device: torch's reserved memory, cuBLAS workspaces, CUDA context and communicators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from legoai.cost.machine.cluster import Machine, machine_of
from legoai.cost.memory.reserving import reserve
from legoai.cost.memory.use import memory_use
from legoai.cost.trace.records import Allocate, Collective, Free, Kernel, Mark, TensorType
from legoai.cost.trace.trace import Trace
from legoai.specs.directives.cluster import ClusterUse

MIB = 2**20


def machine(device: str = "h100_sxm", **options: object) -> Machine:
    return machine_of(ClusterUse(device=device, **options), 8, directory=Path())


def allocate(storage: int, size: int) -> Allocate:
    return Allocate(storage=storage, bytes=size, stream=0, category="activation", module="", phase="forward")


def multiply(stream: int) -> Kernel:
    square = TensorType((8, 8), "bfloat16")
    return Kernel(stream=stream, op="aten.mm", inputs=(square, square), outputs=(square,), flops=1024, bytes_read=256,
                  bytes_written=128, attributes={}, module="", phase="forward")  # fmt: skip


def collective(ranks: tuple[int, ...], kind="all_reduce") -> Collective:
    return Collective(work=0, stream=0, kind=kind, ranks=ranks, axis="", bytes=8, dtype="float32", module="",
                      phase="forward")  # fmt: skip


def trace(*records) -> Trace:
    return Trace(rank=0, world=8, stage=0, items=(Mark("step 1"), *records, Mark("end step 1")))


def test_each_stream_with_products_has_a_cublas_workspace():
    found = trace(allocate(0, 30 * MIB), multiply(0), multiply(0), multiply(3))
    use = memory_use(found, machine())
    assert use.workspace == 2 * 32 * MIB
    assert use.reserved == reserve(found).peak_reserved + use.workspace


def test_cublas_workspace_is_smaller_before_hopper():
    """2 of 4096 KiB and 8 of 16 KiB."""
    assert memory_use(trace(multiply(0)), machine("a100_sxm80")).workspace == (2 * 4096 + 8 * 16) * 1024


def test_each_group_has_an_nccl_communicator():
    found = memory_use(trace(collective((0, 1)), collective((0, 1)), collective(tuple(range(8)))), machine())
    assert found.outside["nccl"] == (544 + 688) * MIB
    assert found.total == found.reserved + sum(found.outside.values())
    assert "nccl" not in memory_use(trace(), machine()).outside


def test_groups_of_the_same_ranks_have_a_communicator_each():
    shard, expert = (replace(collective((0, 1, 2, 3)), axis=axis) for axis in ("dp_shard", "ep"))
    assert memory_use(trace(shard, shard, expert), machine()).outside["nccl"] == 2 * 688 * MIB
    shared = replace(expert, communicator="dp_shard")
    assert memory_use(trace(shard, shared), machine()).outside["nccl"] == 688 * MIB


def test_batched_transfers_use_the_communicator_of_their_group():
    sent, received = collective((0, 1), "send"), collective((1, 0), "receive")
    batched = [replace(item, members=(0, 1, 2, 3)) for item in (sent, received)]
    assert memory_use(trace(sent, received), machine()).outside["nccl"] == 544 * MIB
    assert memory_use(trace(sent, received, *batched), machine()).outside["nccl"] == (544 + 688) * MIB
    of_two = [replace(item, members=(0, 1)) for item in (sent, received)]
    assert memory_use(trace(sent, received, *of_two), machine()).outside["nccl"] == 2 * 544 * MIB


def test_all_to_all_needs_buffers_for_each_peer():
    plain = memory_use(trace(collective(tuple(range(8)))), machine()).outside["nccl"]
    more = memory_use(trace(collective(tuple(range(8)), "all_to_all")), machine()).outside["nccl"]
    assert more - plain == pytest.approx(3.28e9, rel=0.001)


def test_fits_compares_with_the_capacity():
    assert memory_use(trace(allocate(0, 70 * 2**30)), machine()).fits is True
    assert memory_use(trace(allocate(0, 79 * 2**30)), machine()).fits is False


def test_cached_memory_is_released_before_out_of_memory():
    held = trace(allocate(0, 40 * 2**30), Free(0), allocate(1, 60 * 2**30))
    use = memory_use(held, machine())
    assert (use.fits, use.retries) == (True, 1)
    assert use.reserved == 60 * 2**30


def test_a_cpu_has_neither_a_caching_allocator_nor_a_known_capacity():
    use = memory_use(trace(allocate(0, 1000), multiply(0)), machine("cpu", devices=8))
    assert (use.reserved, use.outside, use.fits) == (1024, {}, None)
