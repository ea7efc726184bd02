"""The kernel of attention is the one that the plan names, in forward, in recomputation and in backward."""

from __future__ import annotations

from collections import Counter

import pytest

from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered
from support.training.meshed import TRAINING, TWO_BLOCKS, UNITS, text_of
from support.training.operator_calls import Calls
from support.training.staged import DOUBLE, PLAIN_DOUBLE, STEPS, TOLERANCE, assert_close, train

BOTH = f"""\
mesh (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard {UNITS}{DOUBLE}checkpoint {{ layers.* = full }}
"""
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def counted(text: str, data: str) -> Counter[str]:
    with Calls() as calls:
        train(text, data)
    return calls.counts


@pytest.mark.parametrize("kernel", [pytest.param("math", marks=pytest.mark.slow), "flash"])
def test_every_kernel_trains_as_the_default(kernel: str, gloo, data, alone_in_two_blocks):
    for result in gloo(4)(train, text_of(f"{BOTH}attention {kernel}", TWO_BLOCKS), data):
        assert_close(result, alone_in_two_blocks, TOLERANCE)


def test_kernel_runs_in_forward_recomputation_and_backward(gloo, data):
    micro_batches, layers = 2, 2
    blocks = STEPS * micro_batches * layers
    recomputed = f"{PLAIN_DOUBLE}checkpoint {{ layers.* = full }}\n"
    [flash] = gloo(1)(counted, text_of(f"{recomputed}attention flash", TWO_BLOCKS), data)
    assert flash[FLASH] == 2 * blocks
    assert flash[f"{FLASH}_backward"] == blocks
    assert flash["_softmax"] == 0
    [math] = gloo(1)(counted, text_of(f"{recomputed}attention math", TWO_BLOCKS), data)
    assert math[FLASH] == math[f"{FLASH}_backward"] == 0
    assert math["_softmax"] + math["_safe_softmax"] == 2 * blocks


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [
        ("flash", "FLASH_ATTENTION"),
        ("efficient", "EFFICIENT_ATTENTION"),
        ("cudnn", "CUDNN_ATTENTION"),
        ("math", "MATH"),
    ],
)
def test_program_names_the_kernel(kernel: str, backend: str):
    text = lowered(f"{HEAD}{TRAINING}attention {kernel}").text
    assert f"        attention_kernel=SDPBackend.{backend},  # tiny.plan:9\n" in text
    assert "from torch.nn.attention import SDPBackend\n" in text
    assert "attention_kernel" not in lowered(f"{HEAD}{TRAINING}attention default").text
