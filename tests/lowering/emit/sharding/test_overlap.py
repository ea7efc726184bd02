"""A program whose column-wise layers hide communication in backward trains as one process does."""

from __future__ import annotations

import pytest
import torch

from support.marks import slow_but
from support.texts.plans import HEAD, SEQUENCE_PARALLEL
from support.training import staged
from support.training.meshed import TWO_BLOCKS, UNITS, text_of
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

OVERLAPPED = SEQUENCE_PARALLEL.replace("to = replicate)", "to = replicate, overlap = backward)").replace(
    "loss_parallel = true)", "overlap = backward, loss_parallel = true)"
)
FSDP = f"mesh (dp_shard = 2, tp = 2)\n{OVERLAPPED}fsdp on dp_shard {UNITS}"
PLANS = {
    "alone": f"mesh (tp = 4)\n{OVERLAPPED}{PLAIN_DOUBLE}",
    "fsdp": f"{FSDP}{DOUBLE}",
    "fsdp, units of attention": f"""
mesh (dp_shard = 2, tp = 2)
{OVERLAPPED}
fsdp on dp_shard {{ layers.*.attention = unit, layers.* = unit, output = unit, root = unit }}
{DOUBLE}""",
    "full checkpointing": f"{FSDP}checkpoint {{ layers.* = full, output = full }}\n{DOUBLE}",
    "selective checkpointing": f"""
{FSDP}
checkpoint {{ layers.*.attention = selective([matmul, attention]), layers.*.feed_forward = full }}
{DOUBLE}""",
    "a budget": f"{FSDP}checkpoint {{ layers.* = budget(0.5) }}\n{DOUBLE}",
    "logits gathered": f"mesh (tp = 4)\n{OVERLAPPED}{PLAIN_DOUBLE}".replace(
        "overlap = backward, loss_parallel = true", "output = replicate, overlap = backward"
    ),
    "replicas": f"mesh (dp_replicate = 2, tp = 2)\n{OVERLAPPED}replicate on dp_replicate\n{DOUBLE}",
    "offloaded activations": f"{FSDP}offload (activations = all)\n{DOUBLE}",
    "kept operators around it": f"{FSDP}checkpoint {{ layers.* = selective([attention, collective]) }}\n{DOUBLE}",
    "context parallel": f"""
mesh (cp = 2, tp = 2)
{OVERLAPPED}
context on cp
fsdp on cp {UNITS}
{DOUBLE}""",
}


@pytest.mark.parametrize("name", slow_but(PLANS, "fsdp, units of attention"))
def test_overlapped_backward_equals_one_process(name: str, gloo, data, alone_in_two_blocks):
    for result in gloo(4)(train, text_of(PLANS[name], TWO_BLOCKS), data):
        assert_close(result, alone_in_two_blocks, TOLERANCE)


GPT = HEAD.replace('llama3("tiny")', 'gpt3("125m", n_layers = 2, dim = 64, n_heads = 4, hidden_dim = 128, {options})')
GPT_STYLES = """\
shard on tp {
  {tok_embeddings, pos_embeddings} = rowwise(input = replicate, output = shard(1))
  layers.*.{attention, mlp}_norm   = sequence
  layers.*.{attention, mlp}        = inputs(from = shard(1), to = replicate, overlap = backward)
  layers.*.attention.{wq, wk, wv}  = colwise
  layers.*.attention.wo            = rowwise(output = shard(1))
  layers.*.mlp.up                  = colwise
  layers.*.mlp.down                = rowwise(output = shard(1))
  norm                             = sequence
  output                           = colwise(input = shard(1), overlap = backward, loss_parallel = true)
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_biases_and_tied_output_layer_equal_one_process(tied: bool, gloo, data):
    head = GPT.replace("{options}", f"vocab_size = 256, max_seq_len = 64, tie_embeddings = {str(tied).lower()}")
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    for result in gloo(4)(train, text_of(f"mesh (tp = 4)\n{GPT_STYLES}{PLAIN_DOUBLE}", head), data):
        assert_close(result, one, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["schedule = 1F1B", "schedule = Interleaved1F1B", "split = [output]"])
def test_pipeline_stages_equal_one_process(pipeline: str, gloo, data, unstaged):
    styles = OVERLAPPED.replace("norm                               = sequence\n", "norm = sequence(local = true)\n")
    text = staged.text_of(f"mesh (pp = 2, tp = 2)\n{styles}pipeline on pp ({pipeline})\n{PLAIN_DOUBLE}")
    results = gloo(4)(train, text, data, evaluate_every=2, evaluate_batches=4)
    for name, parameter in together_by_name(results).items():
        torch.testing.assert_close(parameter, unstaged["parameters"][name], rtol=0, atol=TOLERANCE, msg=name)
    assert all(result["loss"] == pytest.approx(unstaged["loss"], abs=TOLERANCE) for result in results)


def together_by_name(results: list[dict]) -> dict:
    found = {name: parameter for result in results for name, parameter in result["parameters"].items()}
    assert len(found) > len(results[0]["parameters"])
    return found


@pytest.mark.slow
def test_autocast_casts_layer_inputs(gloo, data):
    body = "precision (param = bf16)\n"
    [single] = gloo(1)(train, text_of("precision (param = fp32)", TWO_BLOCKS), data)
    plain, overlapped = (
        gloo(4)(train, text_of(f"mesh (tp = 4)\n{styles}{body}", TWO_BLOCKS), data)[0]
        for styles in (SEQUENCE_PARALLEL, OVERLAPPED)
    )
    assert overlapped["dtypes"] == {torch.float32}
    assert overlapped["loss"] == pytest.approx(plain["loss"], rel=4e-3)  # bf16 rounds to 1 in 256
    assert overlapped["loss"] == pytest.approx(single["loss"], rel=1e-2)


@pytest.mark.slow
def test_undivisible_features_equal_one_process(gloo, data):
    head = TWO_BLOCKS.replace("n_layers = 2", "n_layers = 2, vocab_size = 250")
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    for result in gloo(4)(train, text_of(PLANS["logits gathered"], head), data):
        assert_close(result, one, TOLERANCE)
