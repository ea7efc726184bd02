"""Attention to the pieces of a sequence runs the kernel that PyTorch chooses on the simulated device."""

from __future__ import annotations

import pytest

from legoai.cost.capture import capture
from legoai.cost.trace.records import Kernel
from legoai.specs.cluster import device
from support.marks import some_slow
from support.simulation import simulated
from support.texts.plans import lowered

PLAN = """\
plan pieces
model {model}
cluster {device}(devices = 2)
batch (global = 1, micro = 1, seq_len = 256)
mesh (cp = 2)
fsdp blocks on cp
context on cp (rotate = {rotate})
{attention}
precision (param = {dtype})
"""
LLAMA = 'llama3("tiny", n_layers = 1)'
LATENT = 'deepseek("tiny", n_layers = 2, n_heads = 2, nope_head_dim = 128, rope_head_dim = 64, v_head_dim = 128)'


def kernels(name: str, rotate: str, options: dict[str, str]) -> set[str]:
    """The operators of attention in a step, without those of backward; none for matrix products."""
    fields = {"model": LLAMA, "attention": "", "dtype": "bf16", **options}
    program = lowered(PLAN.format(device=name, rotate=rotate, **fields))
    gpu = None if name == "cpu" else device(name)
    trace = capture(program, world=2, kind="cpu" if name == "cpu" else "cuda", gpu=gpu)
    span = trace.steps[-1]
    ops = (item.op for item in trace.records[span.start : span.stop] if isinstance(item, Kernel))
    return {
        op.removeprefix("aten._scaled_dot_product_").removesuffix("_attention")
        for op in ops
        if "scaled_dot_product" in op and not op.endswith("backward")
    }


def chosen(name: str, rotate: str, **options: str) -> set[str]:
    return simulated.in_a_fork(kernels, name, rotate, options)


ROTATIONS = ("alltoall", "allgather", "heads, balance = none")


@pytest.mark.parametrize("rotate", some_slow(ROTATIONS, *ROTATIONS[1:]))
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("h100_sxm", "cudnn"),
        pytest.param("a100_sxm80", "flash", marks=pytest.mark.slow),
        ("cpu", "flash_attention_for_cpu"),
        pytest.param("h200", "cudnn", marks=pytest.mark.slow),
        pytest.param("b200", "cudnn", marks=pytest.mark.slow),
    ],
)
def test_kernel_is_that_of_the_device_as_without_context(name: str, kernel: str, rotate: str):
    assert chosen(name, rotate) == {kernel}


@pytest.mark.parametrize(
    ("name", "kernel", "found"),
    [
        ("h100_sxm", "flash", {"flash"}),
        pytest.param("h100_sxm", "math", set(), marks=pytest.mark.slow),
        pytest.param("a100_sxm80", "cudnn", {"cudnn"}, marks=pytest.mark.slow),
    ],
)
def test_kernel_of_the_plan_is_used(name: str, kernel: str, found: set[str]):
    assert chosen(name, "alltoall", attention=f"attention {kernel}") == found


@pytest.mark.slow
def test_choice_follows_the_dtype_and_the_widths_of_heads():
    assert chosen("h100_sxm", "alltoall", dtype="fp32") == set()
    assert chosen("h100_sxm", "alltoall", model=LATENT) == {"cudnn"}
    assert chosen("a100_sxm80", "alltoall", model=LATENT) == {"flash"}
