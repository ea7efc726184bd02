"""Tolerances by which a program is compared with one device."""

from __future__ import annotations

import pytest
import torch

from legoai.lowering.verify.compare import TOLERANCES, differences, tolerances
from support.plans import HEAD, resolved

BODY = "batch (global = 4, micro = 1, seq_len = 16)\noptimizer adamw\n"
SHARDED = "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit }\n"


@pytest.mark.parametrize(
    ("body", "dtype"),
    [
        ("precision (master = fp64, param = fp64)\n", "fp64"),
        ("precision (param = fp64)\n", "fp32"),
        ("precision (param = fp32)\n", "fp32"),
        (f"{SHARDED}precision (param = fp32, reduce = fp16)\n", "bf16"),
        (f"{SHARDED}precision (param = fp32, reduce = bf16)\n", "bf16"),
        (f"{SHARDED}precision (master = fp64, param = fp64, reduce = fp64)\n", "fp64"),
        (f"{SHARDED}precision (master = fp64, param = fp64)\n", "fp32"),
        ("precision (param = bf16)\n", "bf16"),
    ],
)
def test_the_coarsest_dtype_in_which_a_plan_rounds_decides(body: str, dtype: str):
    assert tolerances(resolved(f"{HEAD}{BODY}{body}")) == TOLERANCES[dtype]


def test_updates_are_measured_by_all_steps_up_to_them():
    """Of a gradient that is rounding alone each of Adam's steps goes any way."""
    gradient, parameter = torch.ones(4), torch.zeros(4)
    reference = {
        "gradients": {"w": gradient}, "clipped": {}, "updated": {"w": parameter}, "trained": {"w": parameter},
        "rates": {"w": [0.1, 0.1]},
    }  # fmt: skip
    own = {
        "gradients": {"w": gradient}, "clipped": {}, "updated": {"w": parameter + 0.1},
        "trained": {"w": parameter + 0.2},
    }  # fmt: skip
    sizes = {item.step: item.size for item in differences(own, reference) if item.kind == "update"}
    assert sizes == {1: pytest.approx(1.0), 2: pytest.approx(1.0)}
