"""Laws that times of attention keep: over shapes, directions and devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from legoai.cost.kernels.features import attention_features
from legoai.cost.kernels.kinds import Attention
from legoai.cost.kernels.roofline import AttentionCurve
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import profile

IMPLEMENTATIONS = ("flash2", "cudnn", "efficient")


def attention(
    *, batch: int = 1, heads: int = 16, queries: int = 4096, keys: int = 4096, width: int = 128, causal: bool = False,
    backward: bool = False, implementation: str = "cudnn",
) -> Attention:  # fmt: skip
    moved = 2 * batch * heads * width * 2 * (queries + keys) * (2 if backward else 1)
    return Attention(
        batch=batch, heads=heads, key_heads=heads, queries=queries, keys=keys, head_dim=width, value_dim=width,
        causal=causal, backward=backward, rate="bf16", implementation=implementation, bytes=moved,
    )  # fmt: skip


def seconds(work: Attention, name: str = "h100_sxm") -> float:
    return seconds_of(work, profile(name))[0]


def curve(*, processors: int = 100) -> AttentionCurve:
    limits = {(128, False): (0.5, 100.0, 2.0), (128, True): (0.5, 100.0, 2.0)}
    return AttentionCurve(peak=1e15, bandwidth=1e30, floor=0, processors=processors, limits=limits)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("queries", [1024, 2048, 4096, 8192])
@pytest.mark.parametrize("heads", [4, 16, 32])
def test_newer_device_is_not_slower_where_few_queries_see_many_keys(backward: bool, queries: int, heads: int) -> None:
    work = attention(heads=heads, queries=queries, keys=126976, backward=backward)
    times = [seconds(work, name) for name in ("b200", "h100_sxm", "a100_sxm80")]
    assert times == sorted(times)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_twice_the_sequences_take_at_most_twice_as_long(implementation: str, backward: bool, causal: bool) -> None:
    # Without the tables of what measurements differ from the formula by: noise of some 5%.
    h100 = profile("h100_sxm")
    formula = replace(
        h100, attention={key: replace(model, table=None) for key, model in h100.attention.items()}, answers={}
    )
    for heads in (2, 8, 32):
        for length in (1024, 2048, 4096, 16384):
            works = [
                attention(
                    batch=batch, heads=heads, queries=length, keys=length, causal=causal, backward=backward,
                    implementation=implementation,
                )
                for batch in (1, 2, 4, 8, 16)
            ]  # fmt: skip
            times = [seconds_of(work, formula)[0] for work in works]
            for one, two in itertools.pairwise(times):
                assert one <= two <= 2 * one, (heads, length, times)


def test_equal_blocks_run_in_waves() -> None:
    for blocks, waves in ((1, 1), (100, 1), (101, 2), (200, 2), (250, 3)):
        work = attention(heads=blocks, queries=128, keys=8192)
        assert curve().utilisation(work) == pytest.approx(1 / (100 / 8192 + waves * 100 / blocks)), blocks


def test_blocks_of_a_backward_are_of_keys() -> None:
    """As FlashAttention-2's, which sums up the gradients of a block of keys over all queries."""
    few, many = 1024, 65536
    ahead = attention(queries=few, keys=many)
    back = attention(queries=many, keys=few, backward=True)
    assert (ahead.blocks, ahead.length) == (back.blocks, back.length) == (16 * 8, many)
    assert curve().utilisation(ahead) == pytest.approx(curve().utilisation(back))
    assert attention_features(ahead, 100)[-2:] == attention_features(back, 100)[-2:]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12])
def test_flash_attention_splits_keys_where_queries_do_not_occupy_the_device(heads: int) -> None:
    work = attention(heads=heads, queries=1024, keys=65536, implementation="flash2")
    assert curve().utilisation(work) > 0.8
    whole = attention(heads=heads, queries=1024, keys=65536, implementation="cudnn")
    assert curve().utilisation(whole) == pytest.approx(1 / (100 / 65536 + 100 / (8 * heads)), rel=1e-6)


def test_attention_without_a_mask_that_was_not_measured_is_called_derived() -> None:
    for name, implementation, backward, derived in (
        ("h100_sxm", "flash2", True, False), ("h100_sxm", "cudnn", False, False), ("h100_sxm", "cudnn", True, True),
        ("b200", "cudnn", False, True),
    ):  # fmt: skip
        work = attention(heads=64, queries=512, keys=126976, backward=backward, implementation=implementation)
        model = seconds_of(work, profile(name))[1]
        assert ("derived" in model) == derived, (name, implementation, backward)
