"""A program whose ranks hold pieces of each sequence trains as one process does."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from support.marks import some_slow
from support.meshed import TRAINING, TWO_BLOCKS, UNITS, text_of
from support.plans import HEAD, SEQUENCE_PARALLEL, errors, lowered
from support.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

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
QUICK = ("keys around the ring", "heads of whole sequences", "beside tensor and sequence parallel")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(string.printable[(7 * i * i + i // 3) % 95] for i in range(20_000)))
    return str(path)


@pytest.fixture(scope="module")
def alone(gloo, data) -> dict:
    """The plan on one process, which sees whole sequences."""
    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE, TWO_BLOCKS), data)
    return result


@pytest.mark.parametrize("name", some_slow(PLANS, *(name for name in PLANS if name not in QUICK)))
def test_pieces_of_sequences_train_as_whole_ones_do(name: str, gloo, data, alone):
    for result in gloo(4)(train, text_of(PLANS[name], TWO_BLOCKS), data):
        assert_close(result, alone, TOLERANCE)


def test_learned_positions_are_those_of_the_pieces(gloo, data):
    head = HEAD.replace('llama3("tiny")', 'gpt2("small", n_layers = 2, dim = 32, n_heads = 4, vocab_size = 256)')
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    for result in gloo(4)(train, text_of(PLANS["beside data parallel, with checkpointing"], head), data):
        assert_close(result, one, TOLERANCE)


@pytest.mark.slow
def test_four_axes_at_once(gloo, data):
    """Shards over two axes beside replicas on eight ranks, and a pipeline beside tensor and context parallel."""
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


def test_heads_are_exchanged_without_dealing_from_both_ends():
    text = lowered(body_of("mesh (dp_shard = 2, cp = 2)\ncontext on cp (rotate = heads)\nfsdp on dp_shard, cp")).text
    assert 'context_parallel_attention(layer.attention, mesh, rotate="heads", balance="none")' in text
    assert 'context_balance="none"' in text
    kernels = "mesh (cp = 4)\ncontext on cp (rotate = heads)\nfsdp on cp\nattention efficient"
    assert errors(body_of(kernels)).keys() == {"LP631"}, "any kernel that the device has"


def test_the_program_names_module_rotation_and_balance():
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
def test_lint_reports_what_would_be_wrong(text: str, code: str, message: str):
    assert errors(body_of(text))[code].startswith(message)
