"""Smaller configs of published causal language models: they build, run, and keep what distinguishes blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from legoai.lowering.shrink import Shrunken
from legoai.lowering.shrink_blocks import Blocks
from legoai.lowering.shrink_decoder import DecoderConfig, smaller_decoder
from legoai.lowering.shrink_sizes import CannotShrinkError, Sizes
from legoai.lowering.verify.prepare import check_alike
from legoai.specs.models.huggingface import transformers_model
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.models.source import ModelSource
from support.commands.verified import here, verified
from support.texts.plans import resolved

__all__ = ["here"]

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {"vocab_size": 32064, "hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 8}
SLIDING = ["sliding_attention", "full_attention"]
ROPE = {"type": "longrope", "long_factor": [1.0 + n / 2 for n in range(36)], "short_factor": [1.0] * 36}
LATENTS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
ROUTED = {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_group": 8, "topk_group": 4}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {**LLAMA, "num_key_value_heads": 4, "head_dim": 256, "layer_types": SLIDING * 4},
    "gpt_oss": {**LLAMA, "num_key_value_heads": 8, "intermediate_size": 2880, "num_local_experts": 32,
                "num_experts_per_tok": 4, "layer_types": SLIDING * 4},
    "smollm3": {**LLAMA, "num_key_value_heads": 4, "no_rope_layers": [1, 1, 1, 0] * 2,
                "layer_types": ["full_attention"] * 8},
    "opt": {**LLAMA, "ffn_dim": 12288, "word_embed_proj_dim": 512, "max_position_embeddings": 2048},
    "falcon": {**LLAMA, "multi_query": True},
    "bloom": {"n_embed": 1024, "n_layer": 8, "num_attention_heads": 16, "vocab_size": 250880},
    "mpt": {"d_model": 4096, "n_heads": 32, "n_layers": 8, "max_seq_len": 2048},
    "mamba2": {"num_hidden_layers": 8, "time_step_limit": [0.0, float("inf")]},
    "phi3": {**LLAMA, "rope_scaling": ROPE, "partial_rotary_factor": 0.75, "max_position_embeddings": 131072,
             "original_max_position_embeddings": 4096, "pad_token_id": 32000},
    "gptj": {"n_embd": 4096, "n_head": 16, "n_layer": 8, "rotary_dim": 64},
    "deepseek_v3": {**LLAMA, **LATENTS, **ROUTED, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
    "qwen3_moe": {**LLAMA, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 2,
                  "mlp_only_layers": [7]},
}  # fmt: skip


def sizes_of(*kept: int) -> Sizes:
    return Sizes(kept=kept, seq_len=32, tp=1, tp_now=1, ep=1, ep_now=1)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_smaller_config_of_a_published_model_builds_and_runs(model_type: str):
    fields = {"model_type": model_type, **PUBLISHED[model_type]}
    decoder = DecoderConfig(fields)
    assert decoder.unknown is None
    values, _ = smaller_decoder(decoder, sizes_of(0, 3, 6))
    with torch.device("meta"):
        model = transformers_model(fields, **values, experts_implementation="batched_mm")
        logits = model(torch.zeros(2, 8, dtype=torch.int64))
    assert logits.shape == (2, 8, 256)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    config = model.config
    assert config.num_hidden_layers == 3
    if model_type == "gemma2":
        assert config.layer_types == [SLIDING[0], SLIDING[1], SLIDING[0]]
    if model_type == "smollm3":
        assert config.no_rope_layers == [1, 0, 1]
    if model_type == "opt":
        assert config.word_embed_proj_dim < config.hidden_size
    if model_type == "deepseek_v3":
        experts = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
        assert experts == [False, True, True]
        assert (config.n_group, config.topk_group) == (2, 1)
    if model_type == "qwen3_moe":
        experts = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
        assert experts == [False, True, False]


def test_kinds_of_blocks_are_those_of_a_config_s_lists_also_where_its_class_derives_them():
    kinds = DecoderConfig({"model_type": "gemma3_text", **LLAMA}).kinds()
    assert kinds is not None
    assert len(kinds) == 8
    assert len(set(kinds)) == 2
    assert DecoderConfig({"model_type": "gptj", **PUBLISHED["gptj"]}).kinds() is None


def test_field_without_a_number_is_named():
    heads = DecoderConfig({"model_type": "mamba", "hidden_size": 64}).unknown
    assert heads == "it has no field num_attention_heads"


PLAN = """plan theirs

model   huggingface("config.json")
cluster cpu(devices = 2)
batch   (global = 16, micro = 2, seq_len = 64)
mesh    (dp_shard = 2{ep})
{shard}
fsdp on dp_shard {{ {blocks} = unit }}
"""


def test_blocks_whose_kind_no_known_field_says_are_refused():
    def manifest(dense: int) -> Manifest:
        model = ModelSource(kind="builtin", target="deepseek", preset="v3", arguments={"n_dense_layers": dense})
        return load_manifest(model, base_directory=".")

    original, (blocks,) = manifest(3), manifest(3).block_lists
    plan = resolved('plan small\nmodel deepseek("v3")\ncluster cpu\nbatch (global = 4, micro = 4, seq_len = 64)\n')
    small = Shrunken(plan=plan, changes=(), blocks=Blocks(blocks.path, blocks.names, (0, 3)))
    check_alike(small, manifest(1), original, "config.json")
    with pytest.raises(CannotShrinkError, match=r"block 1 of a smaller config\.json .*, unlike block 3"):
        check_alike(small, manifest(2), original, "config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "blocks"),
    [("gpt_oss", "model.layers.*"), ("mamba2", "backbone.layers.*"), ("phi3", "model.layers.*")],
)
def test_published_model_equals_one_device(model_type: str, blocks: str, capsys: pytest.CaptureFixture[str]):
    Path("config.json").write_text(json.dumps({"model_type": model_type, **PUBLISHED[model_type]}))
    status, out, err = verified(capsys, PLAN.format(ep="", shard="", blocks=blocks))
    assert status == 0, out + err


@pytest.mark.slow
def test_experts_of_a_published_mixture_are_sharded(capsys: pytest.CaptureFixture[str]):
    Path("config.json").write_text(json.dumps({"model_type": "deepseek_v3", **PUBLISHED["deepseek_v3"]}))
    plan = PLAN.format(ep=", ep = 2", shard="shard standard on ep", blocks="model.layers.*")
    status, out, err = verified(capsys, plan)
    assert status == 0, out + err
