"""Worlds of many thousand ranks: the same trace as of a small world, in the same time."""

from __future__ import annotations

import cProfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from legoai.cost.capture import capture
from legoai.cost.simulated.large_worlds import Chunks
from legoai.cost.trace.records import Allocate, Collective, Kernel, Record
from legoai.cost.trace.trace import Trace
from support.simulation import simulated
from support.texts.plans import SEQUENCE_PARALLEL

PLAN = """\
plan wide
model   llama3("8b", n_layers = 2)
cluster h100_sxm(hosts = {hosts}, fabric = infiniband_ndr)
batch   (global = {hosts}, micro = 1, seq_len = 2048)
mesh    (dp_replicate = 2, dp_shard = {shards}, tp = 8)
{block}fsdp on dp_replicate, dp_shard {{ layers.* = unit, root = unit }}
precision (param = bf16, reduce = fp32)
optimizer adamw(lr = 1e-4)
clip      (norm = 1.0)
"""


def wide(world: int) -> tuple[Trace, int, int]:
    """The trace of a plan on some ranks, the calls of functions and the chunks that it took."""
    from legoai.dsl.lint import lint
    from legoai.lowering.program import lower

    linted = lint(
        PLAN.format(hosts=world // 8, shards=world // 16, block=SEQUENCE_PARALLEL), "wide.plan", directory=Path()
    )
    assert linted.analysis is not None
    program = lower(linted.analysis).text
    capture(program, world=world)  # what is computed once for a process is not counted
    profile, chunks, chunk = cProfile.Profile(), 0, torch.chunk

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal chunks
        made = chunk(*arguments, **options)
        chunks += len(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "chunk", counted)
        profile.enable()
        trace = capture(program, world=world)
        profile.disable()
    return trace, sum(entry.callcount for entry in profile.getstats()), chunks


def without_sizes(record: Record) -> tuple[object, ...]:
    match record:
        case Kernel():
            return Kernel, record.op, len(record.inputs), len(record.outputs), record.module, record.phase
        case Collective():
            return Collective, record.kind, record.axis, record.work, record.module, record.phase
        case Allocate():
            return Allocate, record.storage, record.category, record.module, record.phase
    return type(record), *(getattr(record, name) for name in type(record).__slots__ if name != "bytes")


@pytest.mark.slow
def test_large_world_has_the_trace_and_cost_of_a_small_one():
    (few, *small), (many, *large) = (simulated.in_a_fork(wide, world) for world in (128, 16384))
    assert list(map(without_sizes, many.records)) == list(map(without_sizes, few.records))
    groups = {(item.axis, len(item.ranks)) for item in many.records if isinstance(item, Collective)}
    assert {("tp", 8), ("dp_shard", 1024), ("dp_replicate", 2)} <= groups
    # A mesh takes 12 calls for each rank of the world, once; a chunk for each rank nearly doubled the time.
    assert large[0] - small[0] <= 16 * 16384
    assert large[1] == small[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", [(1,), (4,), (5, 3), (7, 0), (0, 3), (2, 6)])
def test_chunks_equal_torch_chunks(shape, ranks):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for dim in range(len(shape)):
        expected = _fsdp_common._chunk_with_empty(tensor, ranks, dim=dim)
        found = Chunks(tensor, ranks, dim=dim)
        assert len(found) == len(expected) == ranks
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape and torch.equal(ours, theirs)
        assert [item.shape for item in found[1:]] == [item.shape for item in expected[1:]]
        with pytest.raises(IndexError):
            found[ranks]
