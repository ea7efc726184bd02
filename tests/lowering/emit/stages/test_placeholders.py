"""Unchanged models of other authors in stages with placeholders train as one process does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.marks import slow_but, some_slow
from support.texts.plans import lowered, refusals
from support.training.staged import (
    DOUBLE,
    PLAIN_DOUBLE,
    TRAINING,
    assert_close,
    together,
    train,
)

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4,
    "vocab_size": 256, "n_positions": 64, "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def head(model: str) -> str:
    return f"plan theirs\nmodel {model}\ncluster cpu(devices = 4)\n{TRAINING}"


def config(folder: Path, fields: dict) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return head(f'huggingface("{path}")')


FACTORY = head('python("support.models.factories:build", dim = 32, depth = 5)')
TOLERANCE = 1e-10
HUGGING_FACE_TOLERANCE = 1e-6
"""Llama's norms and rotations are computed in fp32, whatever the model's dtype is."""
BODIES = {
    "factory": (FACTORY, "mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n" + PLAIN_DOUBLE),
    "a sequence and nothing else": (
        FACTORY.replace("support.models.factories:build", "support.models.factories:build_sequence"),
        'mesh (pp = 2)\npipeline on pp (schedule = 1F1B, split = ["3"])\n' + PLAIN_DOUBLE,
    ),
    "tokens before samples": (
        FACTORY.replace("support.models.factories:build", "support.models.factories:build_tokens_first"),
        "mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n" + PLAIN_DOUBLE,
    ),
    "transposed gradients": (
        FACTORY.replace("support.models.factories:build", "support.models.factories:build_summed"),
        "mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n" + PLAIN_DOUBLE,
    ),
    "all tokens in one dim": (
        FACTORY.replace("support.models.factories:build", "support.models.factories:build_flat"),
        "mesh (pp = 2)\npipeline on pp (schedule = 1F1B)\n" + PLAIN_DOUBLE,
    ),
    "factory in shards": (
        FACTORY,
        """mesh (pp = 2, dp_shard = 2)
fsdp on dp_shard { blocks.* = unit(reshard = after_backward), blocks.{1, 4}.mixer = unit(reshard = after_backward) }
checkpoint { blocks.{1..3} = full, blocks.4.mixer = full }
pipeline on pp (schedule = Interleaved1F1B)
"""
        + DOUBLE,
    ),
}


@pytest.mark.parametrize("name", slow_but(BODIES, "factory", "transposed gradients"))
def test_unchanged_factory_model_in_stages_equals_one_process(name: str, gloo, data):
    head, body = BODIES[name]
    [alone] = gloo(1)(train, lowered(f"{head}{PLAIN_DOUBLE}").text, data)
    results = gloo(4 if "dp_" in body else 2)(train, lowered(f"{head}{body}").text, data)
    assert_close(together(results), alone, TOLERANCE)


UNITS = "fsdp on dp_shard { blocks.* = unit(reshard = after_backward), head = unit }\n"
OTHER_DTYPES = {
    "narrower": ("build_without_residual", "", ""),
    "wider": ("build_upcast", ", dp_shard = 2", UNITS),
}
"""Factories whose blocks return another dtype than the one between stages."""


@pytest.mark.parametrize("name", some_slow(OTHER_DTYPES, "narrower"))
def test_blocks_that_return_another_dtype_train_in_stages_as_one_process_does(name: str, gloo, data):
    factory, axes, units = OTHER_DTYPES[name]
    head = FACTORY.replace("support.models.factories:build", f"support.models.factories:{factory}")
    [alone] = gloo(1)(train, lowered(f"{head}mesh (dp_shard = 1)\n{units}").text, data)
    body = f"mesh (pp = 2{axes})\n{units}pipeline on pp (schedule = 1F1B)\n"
    result = together(gloo(4 if axes else 2)(train, lowered(f"{head}{body}").text, data))
    assert result["loss"] == pytest.approx(alone["loss"], rel=2e-3)
    assert result["norm"] == pytest.approx(alone["norm"], rel=2e-2)


@pytest.mark.parametrize(
    "rules",
    [pytest.param("", marks=pytest.mark.slow), " { blocks.*.mixer.** = muon(lr = 1e-3) }"],
    ids=["alike", "by Muon"],
)
def test_pipeline_with_a_frozen_stage_trains_and_continues(rules: str, gloo, data, tmp_path):
    head = FACTORY.replace(":build", ":build_half_frozen").replace("depth = 5", "depth = 4")
    head = re.sub("(optimizer .*)", rf"\g<1>{rules}", head)
    [alone] = gloo(1)(train, lowered(f"{head}{PLAIN_DOUBLE}").text, data)
    text = lowered(f"{head}mesh (pp = 2)\npipeline on pp (schedule = 1F1B)\n{PLAIN_DOUBLE}").text
    whole = together(gloo(2)(train, text, data))
    assert whole["loss"] == pytest.approx(alone["loss"], rel=1e-3 if rules else TOLERANCE)
    gloo(2)(train, text, data, out=tmp_path, steps=1)
    rest = together(gloo(2)(train, text, data, out=tmp_path))
    assert (rest["resumed_from"], rest["loss"]) == (1, whole["loss"][1:])
    assert_close({**rest, "loss": whole["loss"], "norm": whole["norm"]}, whole, 0.0)


HUGGING_FACE = {
    "llama": (LLAMA, "mesh (pp = 2)\npipeline on pp (schedule = Interleaved1F1B)\n" + PLAIN_DOUBLE),
    "llama in shards and pieces": (
        LLAMA,
        """mesh (pp = 2, dp_shard = 2, tp = 2)
shard on tp {
  model.layers.*.self_attn.{q_proj, k_proj, v_proj} = colwise
  model.layers.*.self_attn.o_proj                   = rowwise
  model.layers.*.mlp.{gate_proj, up_proj}           = colwise
  model.layers.*.mlp.down_proj                      = rowwise
}
fsdp on dp_shard { model.layers.* = unit(reshard = after_backward) }
checkpoint { model.layers.{0, 3} = full }
pipeline on pp (schedule = 1F1B)
"""
        + DOUBLE,
    ),
    "gpt2": (GPT2, "mesh (pp = 2)\npipeline on pp (schedule = ZBVZeroBubble)\n" + PLAIN_DOUBLE),
    "gpt2, its embedding alone": (
        GPT2,
        "mesh (pp = 2)\npipeline on pp (schedule = GPipe, split = [transformer.h.0])\n" + PLAIN_DOUBLE,
    ),
}


@pytest.mark.parametrize("name", slow_but(HUGGING_FACE, "gpt2"))
def test_unchanged_hugging_face_model_in_stages_equals_one_process(name: str, gloo, data, tmp_path):
    fields, body = HUGGING_FACE[name]
    head = config(tmp_path, fields)
    ranks, replicas = (8, 2) if "dp_shard" in body else (2, 1)
    tolerance = HUGGING_FACE_TOLERANCE if fields is LLAMA else TOLERANCE
    [alone] = gloo(1)(train, lowered(f"{head}{PLAIN_DOUBLE}").text, data, evaluate_every=2, evaluate_batches=8)
    text = lowered(f"{head}{body}").text
    results = gloo(ranks)(train, text, data, evaluate_every=2, evaluate_batches=8 // replicas)
    assert_close(together(results), alone, tolerance)


def test_program_marks_placeholders():
    text = lowered("".join(BODIES["factory in shards"])).text
    assert "            placeholders=True,\n            dtype=torch.float64,\n" in text
    loop = "    for index in range(1, 4):\n        if is_held(model.blocks[index]):\n"
    assert f"{loop}            model.blocks[index] = checkpoint_wrapper(" in text
    assert "    if is_held(model.blocks[4]):\n" in text
    assert re.search(r"^    is_held,$", text, re.MULTILINE), "imported"


def test_modules_with_placeholders_are_neither_recomputed_nor_compiled(tmp_path):
    head = config(tmp_path, GPT2)
    pipeline = "mesh (pp = 2)\npipeline on pp (schedule = GPipe)\n"
    for rule in (
        "checkpoint { transformer = full }",
        "compile { transformer = aot_eager }",
        "compile { root = inductor }",
    ):
        messages = [item.message for item in refusals(f"{head}{pipeline}{rule}")]
        assert any("holds modules of other stages" in item for item in messages), rule
    assert refusals(f"{head}{pipeline}checkpoint {{ transformer.h.* = full }}") == []
