"""Comparison of a program with one device: samples, initial values, differences and tolerances."""

from __future__ import annotations

import pytest
import torch

from legoai.lowering.verify.compare import TOLERANCES, differences, relative, tolerances, unlike, wrong_samples
from legoai.lowering.verify.run import Verdict
from support.texts.plans import HEAD, resolved

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
        ("replicate on dp_replicate\nprecision (param = fp32, reduce = bf16)\n", "bf16"),
        (f"{SHARDED}precision (master = fp64, param = fp64, reduce = fp64)\n", "fp64"),
        (f"{SHARDED}precision (master = fp64, param = fp64)\n", "fp32"),
        ("precision (param = bf16)\n", "bf16"),
    ],
)
def test_coarsest_rounding_dtype_sets_the_tolerance(body: str, dtype: str):
    assert tolerances(resolved(f"{HEAD}{BODY}{body}")) == TOLERANCES[dtype]


def test_updates_by_muon_from_inexact_gradients_may_differ_by_its_rounding():
    """It rounds gradients to bf16; those of fp64 differ too little to be rounded differently."""
    by_muon = "optimizer sgd(lr = 0.1) { layers.*.attention = muon(lr = 0.02) }\n"
    body = BODY.replace("optimizer", "#") + by_muon
    exact = tolerances(resolved(f"{HEAD}{body}precision (master = fp64, param = fp64)\n"))
    rounded = tolerances(resolved(f"{HEAD}{body}precision (param = fp32)\n"))
    assert exact == TOLERANCES["fp64"]
    assert (rounded.loss, rounded.gradient) == (TOLERANCES["fp32"].loss, TOLERANCES["fp32"].gradient)
    assert (rounded.after, rounded.update) == (1e-3, 5e-2)


def test_steps_after_an_update_may_differ_by_more():
    limits = TOLERANCES["fp64, partly fp32"]
    between = (limits.loss + limits.after) / 2
    pairs = ((1.0, 1.0), (1.0 + between, 1.0), (1.0 + 2 * limits.after, 1.0))
    assert Verdict(tolerances=limits, losses=pairs, norms=pairs[:2], differences=()).wrong_losses == (3,)
    assert Verdict(tolerances=limits, losses=pairs[1:2], norms=pairs[:2], differences=()).wrong_losses == (1,)
    assert Verdict(tolerances=limits, losses=pairs[:2], norms=pairs[:2], differences=()).equal


def test_update_differences_are_cumulative():
    """With gradients of rounding errors only, the sign of each Adam step is arbitrary."""
    gradient, parameter = torch.ones(4), torch.zeros(4)
    reference = {
        "gradients": {"w": gradient}, "clipped": {}, "updated": {"w": parameter}, "trained": {"w": parameter},
        "rates": {"w": [0.1, 0.1]},
    }  # fmt: skip
    own = {
        "gradients": {"w": gradient}, "clipped": {}, "updated": {"w": parameter + 0.1},
        "trained": {"w": parameter + 0.2},
    }  # fmt: skip
    sizes = {item.step: item.size for item in differences(own, reference, TOLERANCES["fp32"]) if item.kind == "update"}
    assert sizes == {1: pytest.approx(1.0), 2: pytest.approx(1.0)}


def test_samples_are_compared_with_the_global_batch():
    batch = [["a", "b", "c", "d"]]
    assert wrong_samples([[["a", "b"]], [["c", "d"]], [["a", "b"]], [[]]], batch) == []
    assert wrong_samples([[["a", "b"]], [["a", "b"]]], batch) == [
        "step 1: 2 of the batch's 4 samples are read by no rank"
    ]
    assert wrong_samples([[["a", "b", "a"]], [["c", "d", "x"]]], batch) == [
        "step 1: rank 0 reads a sample twice",
        "step 1: rank 1 reads 1 samples that are not of the batch",
    ]
    assert wrong_samples([[["a", "b", "c"]], [["b", "c", "d"]]], batch) == [
        "step 1: ranks share a part of their samples, and not all of them"
    ]


def test_initial_values_are_compared_with_the_constructor():
    def normal(std: float, *shape: int) -> torch.Tensor:
        return torch.randn(shape) * std

    torch.manual_seed(0)
    built = [normal(0.02, 64, 64), normal(0.02, 64, 64)]
    assert unlike(normal(0.02, 64, 64), built) is None
    assert "its standard deviation is 1" in (unlike(normal(1.0, 64, 64), built) or "")
    assert "its mean is 0.0" in (unlike(normal(0.02, 64, 64) + 0.1, built) or "")
    chance = 6 * 0.02 / 64
    assert unlike(normal(0.02, 64, 64) + chance, built) is None
    assert "its mean is 0.0" in (unlike(normal(0.02, 64, 64) + 2 * chance, built) or "")
    assert "its standard deviation is 0" in (unlike(torch.zeros(64, 64), built) or "")
    assert "its shape" in (unlike(torch.zeros(64), built) or "")
    zeros, ones = torch.zeros(8), torch.ones(8)
    assert unlike(zeros, [zeros, zeros]) is None
    assert unlike(ones, [zeros, zeros]) == "it is 1 throughout, where the model's constructor gives 0 throughout"
    table = torch.arange(12.0)
    assert unlike(table.double(), [table, table]) is None
    assert "from -1 to 10" in (unlike(table - 1, [table, table]) or "")
    assert unlike(normal(9.0, 8), [normal(1.0, 8), normal(1.0, 8)]) is None, "too few to tell"


def test_difference_is_relative_to_the_usual_size():
    large, small, zero = torch.ones(10), torch.full((10,), 1e-9), torch.zeros(10)
    reference = {
        "gradients": {"a": large, "b": small, "c": None},
        "clipped": {},
        "updated": {"a": zero, "b": zero},
        "trained": {"a": zero, "b": zero},
        "rates": {"a": [0.1, 0.2], "b": [0.1, 0.2]},
    }
    own = {
        "gradients": {"a": 1.5 * large, "b": small + 1e-6, "c": None},
        "clipped": {},
        "updated": {"a": zero + 0.01},
        "trained": {"a": zero.clone(), "b": zero * float("nan")},
    }
    sizes = {(item.kind, item.step, item.name): item.size for item in differences(own, reference, TOLERANCES["fp32"])}
    assert sizes["gradient", 1, "a"] == pytest.approx(0.5)
    assert sizes["gradient", 1, "b"] < 1e-2, "of a thousandth of the usual gradient"
    assert sizes["gradient", 1, "c"] == 0.0
    assert sizes["update", 1, "a"] == pytest.approx(0.1), "a tenth of the rate of the first step"
    assert sizes["update", 2, "b"] == float("inf")
    assert relative(float("nan"), 1.0) == float("inf")


@pytest.mark.parametrize(("dtype", "rounding"), [("fp64", 2**-53), ("fp32", 2**-24), ("bf16", 2**-8)])
def test_rounding_of_a_gradient_that_is_zero_is_no_difference_and_half_of_a_small_one_is(dtype: str, rounding: float):
    limits, rate = TOLERANCES[dtype], 0.1
    ones = torch.ones(64)
    reference = {
        "gradients": {"usual": ones, "small": 0.02 * ones, "zero": 1e-3 * rounding * ones},
        "clipped": {},
        "updated": {"usual": -rate * ones, "zero": -rate * ones},
        "trained": {},
        "rates": {"usual": [rate], "small": [rate], "zero": [rate]},
    }
    own = {
        "gradients": {"usual": ones, "small": 0.01 * ones, "zero": -0.5 * rounding * ones},
        "clipped": {},
        "updated": {"usual": rate * ones, "zero": rate * ones},
        "trained": {},
    }
    found = differences(own, reference, limits)
    wrong = [(it.kind, it.name) for it in found if it.size > getattr(limits, it.kind)]
    assert wrong == [("gradient", "small"), ("update", "usual")], "a step of the other sign than one device's"
