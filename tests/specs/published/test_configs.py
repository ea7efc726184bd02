"""Configs of well-known published models, against their presets."""

from __future__ import annotations

from typing import Any

import pytest

from legoai.specs.models.configs import DeepSeekConfig, GPTConfig, LlamaConfig, MixtralConfig
from legoai.specs.models.families import resolve_config
from legoai.specs.published.configs import (
    BUILTIN_FAMILIES,
    NotPublishedError,
    differences,
    nearest_config,
    published_config,
    ties_embeddings,
)

LLAMA_31 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_act": "silu", "num_attention_heads": 128, "num_key_value_heads": 128,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_act": "silu", "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 6, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_method": "greedy",
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama3", "8b", LLAMA_31),
    "Llama 3.2 1B": (
        "llama3",
        "1b",
        {**LLAMA_31, "tie_word_embeddings": True, "rope_scaling": {**LLAMA_31["rope_scaling"], "factor": 32.0}},
    ),
    "Mixtral 8x7B": (
        "mixtral",
        "8x7b",
        {
            "model_type": "mixtral",
            "hidden_act": "silu",
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
        },
    ),
    "DeepSeek-V3": ("deepseek", "v3", DEEPSEEK_V3),
    "DeepSeek-V2-Lite": ("deepseek", "v2_lite", DEEPSEEK_V2_LITE),
    "GPT-2": (
        "gpt2",
        "small",
        {"model_type": "gpt2", "activation_function": "gelu_new", "n_head": 12, "layer_norm_epsilon": 1e-05},
    ),
}
"""As on the hub, without what shapes show."""


def found(config: Any, fields: dict[str, Any]) -> dict[str, bool]:
    return {one.field: one.changes_function for one in differences(published_config(config), fields, builtin=True)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_match_published_configs(name: str):
    family, preset, fields = PUBLISHED[name]
    assert found(resolve_config(family, preset), fields) == {}


def test_missing_config_fields_take_usual_values():
    config = resolve_config("llama3", "8b", {"rope_scaling": 1.0})
    llama_2 = {"model_type": "llama", "num_attention_heads": 32, "rms_norm_eps": 1e-05}
    assert found(config, llama_2) == {"num_key_value_heads": True, "rope_theta": False}
    assert (
        found(config, {**llama_2, "num_key_value_heads": 8, "rope_theta": 5e5, "rope_scaling": {"type": "default"}})
        == {}
    )


@pytest.mark.parametrize(
    ("changed", "which"),
    [
        ({"sliding_window": 4096}, {"sliding_window": False}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": False}),
        ({"num_attention_heads": 64}, {"num_attention_heads": True}),
        ({"hidden_act": "gelu"}, {"hidden_act": True}),
        ({"hidden_act": "swish"}, {}),
        ({"rope_scaling": {**LLAMA_31["rope_scaling"], "factor": 4.0}}, {"rope_scaling": False}),
        ({"rope_parameters": {**LLAMA_31["rope_scaling"], "rope_theta": 1e4}}, {"rope_theta": False}),
        ({"eos_token_id": 7, "initializer_range": 3.0, "torch_dtype": "bfloat16"}, {}),
    ],
)  # fmt: skip
def test_fields_beyond_shapes_are_compared(changed: dict[str, Any], which: dict[str, bool]):
    assert found(resolve_config("llama3", "8b"), {**LLAMA_31, **changed}) == which


MISTRAL = {"model_type": "mistral", "rope_theta": 5e5, "rms_norm_eps": 1e-5, "num_attention_heads": 32}
FULL = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("fields", "which"),
    [
        (MISTRAL, {"sliding_window": False}),
        ({**MISTRAL, "sliding_window": None}, {}),
        ({**MISTRAL, **FULL}, {}),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, {"sliding_window": False}),
        ({**MISTRAL, "model_type": "qwen2", "num_key_value_heads": 8, "sliding_window": 64}, {}),
        ({**MISTRAL, "model_type": "granite"}, {"model_type": True}),
        ({**MISTRAL, "model_type": "vision", "text_config": {"model_type": "llama"}, **FULL, "num_key_value_heads": 8},
         {}),
        ({"text_config": {**MISTRAL, **FULL, "model_type": "llama", "num_key_value_heads": 8}}, {}),
        ({"model_type": "omni", "thinker_config": {"text_config": {**MISTRAL, "sliding_window": None}}}, {}),
        ({**MISTRAL, "model_type": None, **FULL, "num_key_value_heads": 8, "vision_config": {"model_type": "vit"}}, {}),
    ],
)  # fmt: skip
def test_types_have_their_own_defaults(fields: dict[str, Any], which: dict[str, bool]):
    assert found(resolve_config("llama3", "8b", {"rope_scaling": 1.0}), fields) == which


@pytest.mark.parametrize(
    ("changed", "which"),
    [
        ({"topk_method": None, "n_group": 8, "topk_group": 3}, {}),
        ({"topk_method": "group_limited_greedy"}, {}),
        ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
         {"n_group": True, "topk_group": True, "topk_method": True}),
        ({"rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "truncate": False}}, {"rope_scaling": False}),
        ({"rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "truncate": True}}, {}),
    ],
)  # fmt: skip
def test_groups_of_experts_count_where_they_are_used(changed: dict[str, Any], which: dict[str, bool]):
    assert found(resolve_config("deepseek", "v2_lite"), {**DEEPSEEK_V2_LITE, **changed}) == which


def test_model_without_an_exact_class_is_compared_too():
    config = resolve_config("deepseek", "v2_lite", {"normalize_weights": True})
    [one] = differences(nearest_config(config), DEEPSEEK_V2_LITE, builtin=True)
    assert (one.field, one.published, one.own) == ("norm_topk_prob", False, True)


@pytest.mark.parametrize(
    ("fields", "ties"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "tie_word_embeddings": True}, True),
        ({"model_type": "deepseek_v3"}, False),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "gpt2", "tie_word_embeddings": False}, False),
        ({"model_type": "other"}, None),
        ({}, None),
    ],
)
def test_default_of_tied_embeddings_depends_on_the_type(fields: dict[str, Any], ties: bool | None):
    assert ties_embeddings(fields) is ties


def test_every_published_class_names_its_built_in_family():
    variants: list[tuple[str, dict[str, Any]]] = [
        ("llama3", {}),
        ("llama3", {"qkv_bias": True}),
        ("llama3", {"qk_norm": True}),
        ("mixtral", {}),
        ("mixtral", {"qk_norm": True}),
        ("deepseek", {}),
        ("deepseek", {"scores": "softmax", "normalize_weights": False}),
    ]
    models = [(family, resolve_config(family, "tiny", given)) for family, given in variants]
    models.append(("gpt2", resolve_config("gpt2", "small", {})))
    assert {nearest_config(config)["architectures"][0]: family for family, config in models} == BUILTIN_FAMILIES


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (LlamaConfig, {"qk_norm": True, "qkv_bias": True}),
        (LlamaConfig, {"qk_norm": True, "mlp_bias": True}),
        (LlamaConfig, {"qkv_bias": True, "mlp_bias": True}),
        (MixtralConfig, {"qkv_bias": True}),
        (MixtralConfig, {"attention_bias": True}),
        (GPTConfig, {"bias": False}),
        (DeepSeekConfig, {"scores": "softmax"}),
        (DeepSeekConfig, {"norm_eps": 1e-5}),
    ],
)
def test_config_without_a_published_class_is_refused(kind: type, given: dict[str, Any]):
    family = {LlamaConfig: "llama3", MixtralConfig: "mixtral", GPTConfig: "gpt2", DeepSeekConfig: "deepseek"}[kind]
    preset = "small" if family == "gpt2" else "tiny"
    with pytest.raises(NotPublishedError):
        published_config(resolve_config(family, preset, given))
