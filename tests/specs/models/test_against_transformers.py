"""With the same weights, the reference models compute what Hugging Face's compute."""

import pytest
import torch

from legoai.specs.models.configs import GPTConfig, LlamaConfig, MixtralConfig, ViTConfig
from legoai.specs.models.decoder import rotary_factor, rotary_frequencies
from legoai.specs.models.gpt import GPT
from legoai.specs.models.llama import Llama
from legoai.specs.models.mixtral import Mixtral
from legoai.specs.models.vit import ViT

transformers = pytest.importorskip("transformers")

FP32_NORM = 1e-5
"""Error to allow where Hugging Face normalises (and, in Mixtral, routes) in fp32 whatever the model's dtype."""

DECODER_NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.layers.": "layers.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.k_proj.": "attention.wk.",
    "self_attn.v_proj.": "attention.wv.",
    "self_attn.o_proj.": "attention.wo.",
    "self_attn.q_norm.": "attention.q_norm.",
    "self_attn.k_norm.": "attention.k_norm.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.gate.": "feed_forward.router.",
    "mlp.experts.": "feed_forward.experts.",
}


def renamed(state: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    for theirs, ours in names.items():
        state = {name.replace(theirs, ours): tensor for name, tensor in state.items()}
    return state


def randomise(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)


def rotate_exactly(theirs: torch.nn.Module, config: LlamaConfig | MixtralConfig) -> None:
    """Check the frequencies against Hugging Face's, then have its angles, which it rounds to fp32, computed in fp64."""
    frequencies = torch.tensor(rotary_frequencies(config), dtype=torch.float64)
    torch.testing.assert_close(frequencies, theirs.model.rotary_emb.inv_freq.double(), rtol=1e-6, atol=0)
    factor = rotary_factor(config)
    assert factor == pytest.approx(theirs.model.rotary_emb.attention_scaling, rel=1e-12)

    def forward(x, position_ids):
        angles = (position_ids[..., None].double() * frequencies).repeat(1, 1, 2)
        return angles.cos() * factor, angles.sin() * factor

    theirs.model.rotary_emb.forward = forward


def assert_same_logits(ours: torch.nn.Module, theirs: torch.nn.Module, inputs: torch.Tensor, error: float) -> None:
    """Compare in fp64; `error` is relative to the logits' standard deviation."""
    with torch.no_grad():
        expected = theirs.double().eval()(inputs).logits
        torch.testing.assert_close(ours.double()(inputs), expected, rtol=0, atol=error * expected.std().item())


UNSCALED = {"rope_type": "default"}
ORIGINAL = {"rope_original_seq_len": 128}
SCALINGS = {
    "none": ({}, UNSCALED),
    "llama3": (
        {"rope_scaling": 8.0, **ORIGINAL, "rope_low_freq_factor": 1.5, "rope_high_freq_factor": 6.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0},
    ),
    "linear": ({"rope_type": "linear", "rope_scaling": 3.0}, {"rope_type": "linear", "factor": 3.0}),
    "yarn": ({"rope_type": "yarn", "rope_scaling": 4.0, **ORIGINAL}, {"rope_type": "yarn", "factor": 4.0}),
    "yarn of other shares": (
        {
            "rope_type": "yarn",
            "rope_scaling": 16.0,
            **ORIGINAL,
            "rope_beta_fast": 8.0,
            "rope_beta_slow": 2.0,
            "rope_attention_factor": 1.25,
        },
        {"rope_type": "yarn", "factor": 16.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25},
    ),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_llama_logits_equal_transformers(scaling, biased):
    ours_scaled, theirs_scaled = SCALINGS[scaling]
    config = LlamaConfig(
        dim=64,
        n_layers=2,
        n_heads=8,
        n_kv_heads=2,
        hidden_dim=96,
        vocab_size=100,
        max_seq_len=512,
        rope_theta=500.0,  # so that pairs lie on both sides of every boundary
        attention_bias=biased,
        mlp_bias=biased,
        **ours_scaled,
    )
    rope = {"rope_theta": config.rope_theta, "original_max_position_embeddings": 128, **theirs_scaled}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=96,
            vocab_size=100,
            max_position_embeddings=512,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            attention_bias=biased,
            mlp_bias=biased,
        )
    )
    randomise(theirs)
    rotate_exactly(theirs, config)
    ours = Llama(config)
    ours.load_state_dict(renamed(theirs.state_dict(), DECODER_NAMES))
    assert_same_logits(ours, theirs, torch.randint(100, (2, 300)), error=FP32_NORM)


@pytest.mark.parametrize(("name", "options"), [("Qwen2", {"qkv_bias": True}), ("Qwen3", {"qk_norm": True})])
def test_llama_with_explicit_head_dim_equals_qwen(name, options):
    config = LlamaConfig(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=24,
        hidden_dim=96,
        **options,
        vocab_size=100,
        max_seq_len=64,
    )
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            intermediate_size=96,
            vocab_size=100,
            max_position_embeddings=64,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )
    randomise(theirs)
    rotate_exactly(theirs, config)
    ours = Llama(config)
    ours.load_state_dict(renamed(theirs.state_dict(), DECODER_NAMES))
    assert_same_logits(ours, theirs, torch.randint(100, (2, 30)), error=FP32_NORM)


MIXTURE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "experts_implementation": "eager", "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_mixtral_logits_equal_transformers(name):
    """Qwen3's mixture has norms of heads, heads of their own width and, here, biases and tied embeddings."""
    others = name == "Qwen3Moe"
    options = {"head_dim": 24, "qk_norm": True, "attention_bias": True, "tie_embeddings": True} if others else {}
    config = MixtralConfig(
        dim=64,
        n_layers=2,
        n_heads=8,
        n_kv_heads=2,
        hidden_dim=96,
        n_experts=4,
        top_k=2,
        vocab_size=100,
        max_seq_len=64,
        **options,
    )
    sizes = {"intermediate_size": 96, "num_local_experts": 4}
    if others:
        sizes = {"moe_intermediate_size": 96, "num_experts": 4, "norm_topk_prob": True, "head_dim": 24}
        sizes |= {"attention_bias": True, "tie_word_embeddings": True}
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(
            **MIXTURE,
            **sizes,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )
    randomise(theirs)
    rotate_exactly(theirs, config)
    state = renamed(theirs.state_dict(), DECODER_NAMES)
    for item in [item for item in state if item.endswith("gate_up_proj")]:
        prefix = item.removesuffix("gate_up_proj")
        state[f"{prefix}w1"], state[f"{prefix}w3"] = state.pop(item).chunk(2, dim=1)
        state[f"{prefix}w2"] = state.pop(f"{prefix}down_proj")
    ours = Mixtral(config)
    ours.load_state_dict(state)
    assert (ours.output.weight is ours.tok_embeddings.weight) == others
    assert_same_logits(ours, theirs, torch.randint(100, (2, 30)), error=FP32_NORM)


def test_gpt2_logits_equal_transformers():
    config = GPTConfig(dim=64, n_layers=2, n_heads=4, hidden_dim=256, vocab_size=100, max_seq_len=64)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )
    randomise(theirs)
    state = renamed(
        theirs.state_dict(),
        {
            "transformer.wte.": "tok_embeddings.",
            "transformer.wpe.": "pos_embeddings.",
            "transformer.h.": "layers.",
            "transformer.ln_f.": "norm.",
            "lm_head.": "output.",
            "ln_1.": "attention_norm.",
            "ln_2.": "mlp_norm.",
            "attn.c_proj.": "attention.wo.",
            "mlp.c_fc.": "mlp.up.",
            "mlp.c_proj.": "mlp.down.",
        },
    )
    for name in list(state):
        if name.endswith(("wo.weight", "up.weight", "down.weight")):
            state[name] = state[name].T
        if "attn.c_attn." in name:
            for part, piece in zip("qkv", state.pop(name).chunk(3, dim=-1), strict=True):
                state[name.replace("attn.c_attn", f"attention.w{part}")] = piece.t()
    ours = GPT(config)
    ours.load_state_dict(state)
    assert_same_logits(ours, theirs, torch.randint(100, (2, 50)), error=1e-12)


VIT_BLOCK = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "attention_norm",
    "mlp_norm",
    "mlp.up",
    "mlp.down",
)


def test_vit_logits_equal_transformers():
    config = ViTConfig(
        dim=64, n_layers=2, n_heads=4, hidden_dim=96, patch_size=8, image_size=32, n_classes=10, norm_eps=1e-12
    )
    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            patch_size=8,
            image_size=32,
            num_labels=10,
        )
    )
    randomise(theirs)
    ours = ViT(config)
    # By order: transformers renamed this model's parts between releases, but did not rearrange them.
    modules = [
        "embedding.projection",
        *(f"layers.{i}.{part}" for i in range(2) for part in VIT_BLOCK),
        "norm",
        "head",
    ]
    order = [f"{module}.{name}" for module in modules for name in ("weight", "bias")]
    order = ["embedding.class_token", "embedding.positions", *order]
    ours.load_state_dict(dict(zip(order, theirs.state_dict().values(), strict=True)))
    assert_same_logits(ours, theirs, torch.randn(2, 3, 32, 32, dtype=torch.float64), error=1e-12)
