"""DeepSeek's latent attention, dense blocks and shared experts train on several ranks as on one process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from support.texts.plans import errors, lowered
from support.training.meshed import TRAINING, UNITS
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, together, train

HEAD = """\
plan latent

model   deepseek("tiny", dim = 32, n_layers = 3, q_lora_rank = {lora}, kv_lora_rank = 12, n_heads = 4, hidden_dim = 16,
                 dense_hidden_dim = 64, nope_head_dim = 8, rope_head_dim = 4, v_head_dim = 12, max_seq_len = 64)
cluster cpu(devices = 4)
"""
EXPERTS = "shard standard on ep\n"
PLANS = {
    "experts on all ranks": f"mesh (dp_shard = 4, ep = 4)\n{EXPERTS}fsdp on dp_shard {UNITS}{DOUBLE}",
    "beside sequence parallel": f"""
mesh (dp_shard = 2, tp = 2, ep = 2)
shard standard on tp (sequence, loss_parallel, overlap)
{EXPERTS}
fsdp on dp_shard {UNITS}
checkpoint {{ layers.* = selective([attention, matmul]) }}
{DOUBLE}""",
    "keys gathered, beside tensor parallel": f"""
mesh (dp_shard = 1, cp = 2, tp = 2, ep = 2)
shard standard on tp
{EXPERTS}
context on cp
fsdp on cp {UNITS}
{DOUBLE}""",
    "heads for tokens": f"""
mesh (dp_shard = 2, cp = 2, ep = 4)
{EXPERTS}
context on cp (rotate = heads)
fsdp on dp_shard, cp {UNITS}
{DOUBLE}""",
}
PIPELINED = f"""
mesh (pp = 2, dp_shard = 2, ep = 2)
{EXPERTS}
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit }}
pipeline on pp (schedule = 1F1B, split = [layers.1])
checkpoint {{ layers.* = full }}
{DOUBLE}"""


def text_of(body: str, lora: int = 16) -> str:
    return lowered(f"{HEAD.format(lora=lora)}{TRAINING}{body}").text


def trained(texts: list[str], data: str) -> list[dict]:
    return [train(text, data) for text in texts]


def check(lora: int, names: Iterable[str], gloo, data: str) -> None:
    """Compare plans, and stages, on four processes with one process."""
    [[alone]] = gloo(1)(trained, [text_of(PLAIN_DOUBLE, lora)], data)
    texts = [text_of(body, lora) for body in (*(PLANS[name] for name in names), PIPELINED)]
    *ranks, stages = zip(*gloo(4)(trained, texts, data), strict=True)
    for name, results in zip(names, ranks, strict=True):
        for result in results:
            try:
                assert_close(result, alone, TOLERANCE)
            except AssertionError as error:
                error.add_note(name)
                raise
    assert_close(together(list(stages)), alone, TOLERANCE)


@pytest.mark.slow
def test_ranks_train_as_one_process_does(gloo, data: str):
    check(16, ["beside sequence parallel", "keys gathered, beside tensor parallel"], gloo, data)


@pytest.mark.slow
def test_ranks_train_as_one_process_does_without_a_latent_of_queries(gloo, data: str):
    check(0, PLANS, gloo, data)


def test_heads_that_tp_does_not_divide_and_latents_that_are_cut_are_reported():
    head = HEAD.format(lora=16) + TRAINING
    found = errors(f"{head.replace('n_heads = 4', 'n_heads = 6')}mesh (tp = 4)\nshard standard on tp\n")
    assert list(found) == ["LP401"]
    for rule in ("layers.*.attention.wq_a = colwise", "layers.*.attention.k_rope = unset"):
        assert errors(
            f"{head}mesh (dp_shard = 2, tp = 2)\nshard standard on tp {{ {rule} }}\nfsdp blocks on dp_shard\n"
        )


def test_rotated_keys_of_whole_heads_are_not_shared():
    rules = "shard on tp {\n  layers.*.attention.k_rope = shared\n  output = colwise(output = replicate)\n}\n"
    found = errors(f"{HEAD.format(lora=16)}{TRAINING}mesh (dp_shard = 2, tp = 2)\n{rules}fsdp blocks on dp_shard\n")
    assert list(found) == ["LP429"]
