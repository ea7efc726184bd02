"""Parameters that are placed by themselves, and norms over heads: plans train as one process does, or are refused."""

from __future__ import annotations

import pytest

import legoai.runtime.training.trainer  # noqa: F401  what torch registers once must not come with an inspected model
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.texts.drawn_plans import CONFIGS
from support.training.staged import assert_close, train

LLAMA = 'llama3("tiny", n_layers = 1, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 64, vocab_size = 256)'
GPT = 'gpt2("small", n_layers = 1, dim = 32, n_heads = 4, hidden_dim = 64, vocab_size = 256, max_seq_len = 64)'
QWEN = 'huggingface("qwen3.json", num_hidden_layers = 1)'
HEADS = """\
model.layers.*.self_attn.{q,k,v}_proj = colwise
model.layers.*.self_attn.{q,k}_norm = heads
model.layers.*.self_attn.o_proj = rowwise
"""
PAIRS = """\
layers.*.attention.{wq, wk, wv} = colwise
layers.*.attention.wo = rowwise
"""
AS_DTENSOR = "norm = inputs(from = replicate, to = replicate)\nnorm.weight = replicate\n"

CLEAN = {
    LLAMA: [
        "output.weight = shard(0)",
        "output.weight = shard(1)",
        "output.weight = replicate",
        "tok_embeddings.weight = shard(0)",
        "tok_embeddings.weight = shard(1)",
        "norm.weight = replicate",
        "layers.*.{attention, ffn}_norm.weight = shard(0)",
        "layers.*.attention.{wq, wk, wv}.weight = shard(0)\nlayers.*.attention.wo.weight = shard(1)",
        "layers.*.attention.wk.weight = shard(1)",
        f"{PAIRS}layers.*.feed_forward.w2.weight = shard(0)\n{{tok_embeddings, output}}.weight = shard(0)",
        f"{AS_DTENSOR}output.weight = shard(0)\noutput = outputs(from = shard(-1), to = replicate)",
        f"{AS_DTENSOR}output = colwise(loss_parallel = true)",
        "layers.*.feed_forward = inputs(from = replicate, to = replicate)\n"
        "layers.*.feed_forward.{w1, w3}.weight = shard(0)\nlayers.*.feed_forward.w2.weight = shard(1)\n"
        "layers.*.feed_forward.w2 = outputs(from = partial, to = replicate)",
    ],
    GPT: [
        "layers.*.mlp.up.weight = replicate",
        "layers.*.mlp.up.bias = shard(0)",
        "layers.*.mlp.down.weight = shard(1)",
        "layers.*.{attention, mlp}_norm.bias = replicate",
        "pos_embeddings.weight = shard(0)",
        "tok_embeddings.weight = shard(0)\noutput.weight = shard(0)",
        "layers.*.attention.{wq, wk, wv}.{weight, bias} = shard(0)\nlayers.*.attention.wo.bias = replicate",
    ],
    QWEN: [
        HEADS,
        f"{HEADS}lm_head.weight = shard(0)",
        "model.layers.*.self_attn.{q,k}_norm.weight = replicate",
        "model.layers.*.input_layernorm.weight = shard(0)\nmodel.norm.weight = replicate",
    ],
}
REFUSED = {
    LLAMA: {
        "output.weight = shard(0)\noutput = inputs(from = replicate, to = replicate)": "LP419",
        AS_DTENSOR: "LP420",
        "layers.*.attention = inputs(from = replicate, to = replicate)\n"
        "layers.*.attention.*.weight = replicate": "LP420",
        "tok_embeddings = rowwise(output = shard(1))\nlayers.*.attention_norm.weight = replicate": "LP412",
        "layers.*.feed_forward.{w1, w3} = colwise\nlayers.*.feed_forward.w2.weight = shard(1)": "LP412",
        f"{PAIRS}layers.*.attention_norm = heads": "LP421",
        f"{PAIRS}layers.*.attention = heads": "LP407",
    },
    GPT: {
        "layers.*.attention = inputs(from = replicate, to = replicate)\n"
        "layers.*.attention.**.{weight, bias} = replicate": "LP422",
    },
    QWEN: {
        HEADS.replace("heads", "sequence"): "LP421",
        HEADS.replace("= heads", "= none").replace("model.layers.*.self_attn.{q,k}_norm = none\n", ""): "LP414",
        "model.layers.*.self_attn.{q,k}_norm = heads": "LP421",
    },
}


def plan(model: str, rules: str) -> str:
    ranks = 2 if rules else 1
    shard = f"mesh (tp = 2)\nshard on tp {{\n{rules}\n}}\n" if rules else ""
    return (
        f"plan placed\nmodel {model}\ncluster cpu(devices = {ranks})\nbatch (global = 2, micro = 1, seq_len = 16)\n"
        f"optimizer adamw(lr = 1e-2)\nprecision (master = fp64, param = fp64)\n{shard}"
    )


def linted(text: str):
    return lint(text, "placed.plan", directory=CONFIGS)


def trained(programs: list[str], data: str) -> list[dict]:
    return [train(program, data, steps=2) for program in programs]


def program(text: str) -> str:
    found = linted(text)
    assert not found.has_errors, (text, [item.message for item in found.diagnostics])
    return lower(found.analysis).text


@pytest.mark.slow
@pytest.mark.parametrize("model", CLEAN, ids=["llama", "gpt", "qwen"])
def test_placed_parameters_equal_one_process(model: str, gloo, data):
    [[one]] = gloo(1)(trained, [program(plan(model, ""))], data)
    tolerance = 1e-4 if model == QWEN else 1e-10  # some of its norms are in fp32
    for results in gloo(2)(trained, [program(plan(model, rules)) for rules in CLEAN[model]], data):
        for rules, result in zip(CLEAN[model], results, strict=True):
            try:
                assert_close(result, one, tolerance)
            except AssertionError as error:
                raise AssertionError(rules) from error


@pytest.mark.parametrize(
    ("model", "rules", "code"), [(model, *item) for model, cases in REFUSED.items() for item in cases.items()]
)
def test_placement_that_fails_in_forward_is_refused(model: str, rules: str, code: str):
    assert code in {item.code for item in linted(plan(model, rules)).diagnostics if item.severity == "error"}


def test_parameter_used_in_an_own_forward_cannot_be_placed():
    text = plan('vit("tiny")', "embedding.positions = replicate").replace(", seq_len = 16", "")
    assert {item.code for item in linted(text).diagnostics if item.severity == "error"} == {"LP010"}
