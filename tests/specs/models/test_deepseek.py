"""DeepSeek-V2 and -V3 have the published sizes, and compute what Hugging Face's compute."""

import pytest
import torch

from legoai.specs.models.config_checks import ConfigError
from legoai.specs.models.configs import DeepSeekConfig
from legoai.specs.models.decoder import rotary_frequencies
from legoai.specs.models.deepseek import DeepSeek, MoE
from legoai.specs.models.families import resolve_config

SIZES = {
    "dim": 64, "n_layers": 3, "n_dense_layers": 1, "n_heads": 4, "kv_lora_rank": 24, "nope_head_dim": 16,
    "rope_head_dim": 8, "v_head_dim": 12, "dense_hidden_dim": 96, "hidden_dim": 32, "n_experts": 8, "top_k": 3,
    "n_groups": 4, "top_groups": 2, "vocab_size": 100, "max_seq_len": 512,
}  # fmt: skip
YARN = {"rope_scaling": 4.0, "rope_original_seq_len": 128, "rope_mscale": 0.7, "rope_theta": 500.0}
MODELS = {
    "v3": {"q_lora_rank": 20, "n_shared_experts": 1, "routed_scaling": 2.5},
    "v3 by yarn": {"q_lora_rank": 20, "n_shared_experts": 1, **YARN},
    "v3 in one group": {"q_lora_rank": 20, "n_shared_experts": 2, "n_groups": 1, "top_groups": 1},
    "v3 with unscaled weights": {"q_lora_rank": 0, "n_shared_experts": 1, "normalize_weights": False},
    "v2": {"q_lora_rank": 20, "n_shared_experts": 2, "routed_scaling": 16.0, **YARN},
    "v2 lite": {"q_lora_rank": 0, "n_shared_experts": 2, "n_groups": 1, "top_groups": 1},
}
FP32_NORM = 1e-5
"""Error to allow where Hugging Face normalises and routes in fp32 whatever the model's dtype."""

NAMES = {
    "model.embed_tokens.": "tok_embeddings.", "model.layers.": "layers.", "model.norm.": "norm.", "lm_head.": "output.",
    "input_layernorm.": "attention_norm.", "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.q_a_proj.": "attention.wq_a.", "self_attn.q_a_layernorm.": "attention.q_norm.",
    "self_attn.q_b_proj.": "attention.wq_b.", "self_attn.kv_a_proj_with_mqa.": "attention.wkv_a.",
    "self_attn.kv_a_layernorm.": "attention.kv_norm.", "self_attn.kv_b_proj.": "attention.wkv_b.",
    "self_attn.o_proj.": "attention.wo.", "mlp.gate.e_score_correction_bias": "feed_forward.selection_bias",
    "mlp.gate.": "feed_forward.router.", "mlp.shared_experts.gate_proj.": "feed_forward.shared.w1.",
    "mlp.shared_experts.up_proj.": "feed_forward.shared.w3.",
    "mlp.shared_experts.down_proj.": "feed_forward.shared.w2.", "mlp.experts.": "feed_forward.experts.",
    "mlp.gate_proj.": "feed_forward.w1.", "mlp.up_proj.": "feed_forward.w3.", "mlp.down_proj.": "feed_forward.w2.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "parameters"), [("v2_lite", 15_706_484_224), ("v2", 235_741_434_880), ("v3", 671_026_404_352)]
)
def test_presets_have_as_many_parameters_as_the_published_weights(preset, parameters):
    """The elements of the released files: of V3 without multi-token prediction and the buffers of the routers."""
    with torch.device("meta"):
        model = DeepSeek(resolve_config("deepseek", preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"n_dense_layers": 3}, "n_dense_layers"), ({"rope_head_dim": 7}, "rope_head_dim"),
        ({"n_groups": 3}, "n_groups"),
        ({"top_groups": 5}, "top_groups"), ({"top_k": 5}, "top_k"), ({"n_groups": 8, "top_groups": 8}, "n_groups"),
        ({"scores": "tanh"}, "scores"), ({"hidden_dim": 12}, "hidden_dim"), ({"q_lora_rank": -1}, "q_lora_rank"),
        ({"rope_scaling": 0.5}, "rope_scaling"), ({"rope_mscale": -1.0}, "rope_mscale"),
        ({"rope_beta_fast": 64.0}, "rope_beta_fast"), ({"rope_beta_slow": 2.0}, "rope_beta_slow"),
        ({"rope_original_seq_len": 128}, "rope_original_seq_len"), ({"rope_mscale": 0.5}, "rope_mscale"),
        ({"rope_beta_slow": 40.0}, "rope_beta_slow"), ({"rope_theta": 1.0, "rope_scaling": 2.0}, "rope_theta"),
    ],
)  # fmt: skip
def test_dimensions_that_disagree(changes, argument):
    with pytest.raises(ConfigError) as raised:
        DeepSeekConfig(**{**SIZES, **MODELS["v3"], **changes})
    assert raised.value.argument == argument


def test_no_gradient_reaches_the_bias_which_changes_only_the_choice():
    torch.manual_seed(0)
    moe = MoE(DeepSeekConfig(**{**SIZES, **MODELS["v3 in one group"]})).double()
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    logits = moe.router(x.flatten(0, 1))
    weights, chosen = moe.choose(logits)
    assert moe.selection_bias is not None and not moe.selection_bias.requires_grad
    moe.selection_bias[3] = 10.0
    biased, forced = moe.choose(logits)
    assert (forced == 3).any(-1).all() and not (chosen == 3).any(-1).all()
    scores = logits.sigmoid().gather(-1, forced)
    torch.testing.assert_close(biased, scores / scores.sum(-1, keepdim=True), rtol=0, atol=1e-12)
    assert weights.sum(-1).sub(1).abs().max() < 1e-12


def theirs_like(config: DeepSeekConfig) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling > 1:
        of_yarn = {"mscale": config.rope_mscale, "mscale_all_dim": config.rope_mscale}
        rope |= {"rope_type": "yarn", "factor": config.rope_scaling, "original_max_position_embeddings": 128, **of_yarn}
    fields = {
        "hidden_size": config.dim, "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads, "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank, "qk_nope_head_dim": config.nope_head_dim,
        "qk_rope_head_dim": config.rope_head_dim, "v_head_dim": config.v_head_dim,
        "intermediate_size": config.dense_hidden_dim, "moe_intermediate_size": config.hidden_dim,
        "n_routed_experts": config.n_experts, "n_shared_experts": config.n_shared_experts,
        "num_experts_per_tok": config.top_k, "n_group": config.n_groups, "topk_group": config.top_groups,
        "first_k_dense_replace": config.n_dense_layers, "routed_scaling_factor": config.routed_scaling,
        "norm_topk_prob": config.normalize_weights, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps, "rope_parameters": rope,
        "experts_implementation": "eager",
    }  # fmt: skip
    if config.scores == "sigmoid":
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields))
    method = "greedy" if config.n_groups == 1 else "group_limited_greedy"
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**fields, topk_method=method))


def rotate_exactly(theirs: torch.nn.Module, config: DeepSeekConfig) -> None:
    """Check the frequencies against Hugging Face's, then have its angles, which it rounds to fp32, computed in fp64."""
    embedding = theirs.model.rotary_emb
    frequencies = torch.tensor(rotary_frequencies(config), dtype=torch.float64)
    torch.testing.assert_close(frequencies, embedding.inv_freq.double(), rtol=1e-6, atol=0)
    assert embedding.attention_scaling == 1

    def forward(x, position_ids):
        angles = position_ids[..., None].double() * frequencies
        if config.scores == "softmax":
            return torch.polar(torch.ones_like(angles), angles)
        return angles.repeat(1, 1, 2).cos(), angles.repeat(1, 1, 2).sin()

    embedding.forward = forward


def as_ours(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename Hugging Face's parameters, or their gradients."""
    for theirs, ours in NAMES.items():
        state = {name.replace(theirs, ours): tensor for name, tensor in state.items()}
    for item in [item for item in state if item.endswith("gate_up_proj")]:
        prefix = item.removesuffix("gate_up_proj")
        state[f"{prefix}w1"], state[f"{prefix}w3"] = state.pop(item).chunk(2, dim=1)
        state[f"{prefix}w2"] = state.pop(f"{prefix}down_proj")
    return state


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name):
    scores = "softmax" if name.startswith("v2") else "sigmoid"
    config = DeepSeekConfig(**{**SIZES, "scores": scores, "normalize_weights": scores == "sigmoid", **MODELS[name]})
    theirs = theirs_like(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *(item for item in theirs.buffers() if len(item) == config.n_experts)):
            tensor.normal_(std=0.3)
    rotate_exactly(theirs, config)
    ours = DeepSeek(config)
    ours.load_state_dict(as_ours(theirs.state_dict()))
    ours, theirs = ours.double(), theirs.double().eval()
    tokens = torch.randint(100, (2, 60))
    expected, actual = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=FP32_NORM * expected.std().item())

    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    gradients = as_ours({path: parameter.grad for path, parameter in theirs.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for path, parameter in ours.named_parameters():
        error = (parameter.grad - gradients[path]).abs().max() / gradients[path].std()
        assert error < 1e-4, path
