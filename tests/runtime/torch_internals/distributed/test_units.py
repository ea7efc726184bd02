"""Gradient buffers of FSDP units."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from legoai.runtime.torch_internals.distributed.units import summed_in_other_type, unsharded_gradients
from support.simulated import in_a_fork

BF16, FP32 = torch.bfloat16, torch.float32


def summed(param: torch.dtype | None, reduce: torch.dtype | None) -> list[torch.dtype | None]:
    """Gradient buffers after two backward passes without reduction: as computed, and its sum."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("fake", rank=0, world_size=2)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (2,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce),
    )
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    gradients = [getattr(owner, name) for owner, name in unsharded_gradients(summed_in_other_type(model))]
    return [None if gradient is None else gradient.dtype for gradient in gradients]


@pytest.mark.parametrize(
    ("param", "reduce", "kept"),
    [
        (BF16, FP32, [None, FP32]),
        (None, BF16, [None, BF16]),
        (BF16, None, []),
        (BF16, BF16, []),
        (None, FP32, []),
        (None, None, []),
    ],
)
def test_gradient_accumulation_dtype_follows_the_reduction_dtype(param, reduce, kept):
    assert in_a_fork(summed, param, reduce) == kept
