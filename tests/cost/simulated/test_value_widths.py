"""The attention kernel for values of another width than keys is the one that PyTorch chooses on the device."""

from __future__ import annotations

import pytest

from legoai.cost.capture import capture
from legoai.cost.kernels.kinds import Attention
from legoai.cost.kernels.work import work_of
from legoai.cost.trace.records import Kernel
from legoai.specs.cluster import device
from support.simulation import simulated
from support.texts.plans import lowered

PLAN = """\
plan widths
model deepseek("tiny", n_layers = 2, n_heads = 2, nope_head_dim = {nope}, rope_head_dim = 64, v_head_dim = 128)
cluster {device}(devices = 1)
batch (global = 1, micro = 1, seq_len = 256)
{attention}
"""


def attention(nope: int, name: str, kernel: str) -> list[Attention]:
    program = lowered(PLAN.format(nope=nope, device=name, attention=f"attention {kernel}"))
    trace = capture(program, world=1, kind="cuda", gpu=device(name))
    span = trace.steps[-1]
    works = (work_of(item) for item in trace.records[span.start : span.stop] if isinstance(item, Kernel))
    return [work for work in works if isinstance(work, Attention)]


@pytest.mark.parametrize(
    ("nope", "name", "kernel", "chosen"),
    [
        (128, "h100_sxm", "default", "cudnn"),
        pytest.param(128, "a100_sxm80", "default", "efficient", marks=pytest.mark.slow),
        pytest.param(64, "a100_sxm80", "cudnn", "cudnn", marks=pytest.mark.slow),
        pytest.param(96, "b200", "default", "efficient", marks=pytest.mark.slow),
        pytest.param(128, "b200", "efficient", "efficient", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_has_the_operations_of_both_widths(nope: int, name: str, kernel: str, chosen: str):
    """Keys of 192 features with values of 128 have a kernel of cuDNN on GPUs of compute capability 9 and 10."""
    found = simulated.in_a_fork(attention, nope, name, kernel)
    assert {work.implementation for work in found} == {chosen}
    assert [work.backward for work in found] == [False, False, True, True]
    assert {(work.head_dim, work.value_dim) for work in found} == {(nope + 64, 128)}
    scores = 2 * 256 * 256 / 2  # of the heads, half of them masked
    forward, backward = found[0].flops, found[-1].flops
    assert forward == pytest.approx(2 * scores * (nope + 64 + 128))
    assert backward == pytest.approx(2 * scores * (3 * (nope + 64) + 2 * 128))
