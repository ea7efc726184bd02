"""A program whose ranks hold pieces of each sequence trains as one process does."""

from __future__ import annotations

import pytest

from support.marks import slow_but
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, errors, lowered
from support.training.meshed import TRAINING, TWO_BLOCKS, UNITS, text_of
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

PLANS = {
    "keys gathered": f"mesh (cp = 4)\ncontext on cp\nfsdp on cp {UNITS}{DOUBLE}",
    "keys around the ring": f"mesh (cp = 4)\ncontext on cp (rotate = alltoall)\nfsdp on cp {UNITS}{DOUBLE}",
    "keys gathered, pieces in order": f"mesh (cp = 4)\ncontext on cp (balance = none)\nfsdp on cp {UNITS}{DOUBLE}",
    "heads of whole sequences": f"""
mesh (dp_shard = 2, cp = 2)
context on cp (rotate = heads)
fsdp on dp_shard, cp {UNITS}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "heads of whole sequences beside tensor parallel, with the outputs of attention kept": f"""
mesh (cp = 2, tp = 2)
{SEQUENCE_PARALLEL}
context on cp (rotate = heads)
fsdp on cp {UNITS}
checkpoint {{ layers.* = selective(keep = [attention]) }}
{DOUBLE}""",
    "beside data parallel, with checkpointing": f"""
mesh (dp_shard = 2, cp = 2)
context on cp (rotate = alltoall, balance = none)
fsdp on dp_shard, cp {UNITS}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "beside replicas, with the outputs of attention kept": f"""
mesh (dp_replicate = 2, cp = 2)
context on cp
fsdp on dp_replicate, cp {UNITS}
checkpoint {{ layers.* = selective(keep = [attention]) }}
{DOUBLE}""",
    "replicated shards": f"""
mesh (dp_shard = 2, cp = 2)
context on cp
fsdp on dp_shard {UNITS}
{DOUBLE}""",
    "beside tensor and sequence parallel": f"""
mesh (cp = 2, tp = 2)
{SEQUENCE_PARALLEL}
context on cp (rotate = alltoall)
fsdp on cp {UNITS}
checkpoint {{ layers.* = every(2) }}
{DOUBLE}""",
}


@pytest.mark.parametrize("name", slow_but(PLANS, "heads of whole sequences"))
def test_context_parallel_equals_one_process(name: str, gloo, data, alone_in_two_blocks):
    for result in gloo(4)(train, text_of(PLANS[name], TWO_BLOCKS), data):
        assert_close(result, alone_in_two_blocks, TOLERANCE)


@pytest.mark.slow
def test_learned_positions_follow_the_sequence_shards(gloo, data):
    head = HEAD.replace('llama3("tiny")', 'gpt2("small", n_layers = 2, dim = 32, n_heads = 4, vocab_size = 256)')
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    for result in gloo(4)(train, text_of(PLANS["beside data parallel, with checkpointing"], head), data):
        assert_close(result, one, TOLERANCE)


@pytest.mark.slow
def test_context_parallel_on_four_axes_equals_one_process(gloo, data):
    """Shards over two axes with replicas on eight ranks, and a pipeline with tensor and context parallelism."""
    plans = (
        f"""
mesh (dp_replicate = 2, dp_shard = 2, cp = 2)
context on cp
fsdp on dp_replicate, dp_shard, cp {UNITS}
{DOUBLE}""",
        f"""
mesh (pp = 2, dp_shard = 1, cp = 2, tp = 2)
pipeline on pp (schedule = 1F1B, microbatches = 2)
{SEQUENCE_PARALLEL}
context on cp
fsdp on dp_shard, cp {{ layers.* = unit(reshard = after_backward), root = unit }}
{DOUBLE}""",
    )
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE), data)
    for plan in plans:
        for result in gloo(8)(train, text_of(plan), data):
            held = {**one, "parameters": {name: one["parameters"][name] for name in result["parameters"]}}
            assert_close(result, held, TOLERANCE)


def body_of(text: str) -> str:
    return f"{HEAD}{TRAINING}{text}"


def test_head_exchange_uses_no_load_balancing():
    text = lowered(body_of("mesh (dp_shard = 2, cp = 2)\ncontext on cp (rotate = heads)\nfsdp on dp_shard, cp")).text
    assert 'context_parallel_attention(layer.attention, mesh, rotate="heads", balance="none")' in text
    assert 'context_balance="none"' in text
    kernels = "mesh (cp = 4)\ncontext on cp (rotate = heads)\nfsdp on cp\nattention efficient"
    assert errors(body_of(kernels)).keys() == {"LP631"}, "any kernel that the device has"


def test_program_names_module_rotation_and_balance():
    text = lowered(body_of("mesh (dp_shard = 2, cp = 2)\ncontext on cp\nfsdp on dp_shard, cp")).text
    assert 'context_parallel_attention(layer.attention, mesh, rotate="allgather", balance="head_tail")' in text
    assert 'apply_fsdp(model, join_axes(mesh, ("dp_shard", "cp")))' in text
    assert 'context_axis="cp"' in text


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("mesh (cp = 4)\nfsdp on cp", "LP306", "no statement uses the 4 ranks of `cp`"),
        (
            "mesh (cp = 4)\ncontext on cp\nfsdp on cp\nattention efficient",
            "LP010",
            "`attention efficient` is not lowered together",
        ),
    ],
)
def test_lint_reports_unsupported_context_parallelism(text: str, code: str, message: str):
    assert errors(body_of(text))[code].startswith(message)
