"""Small published models, as `transformers` saves them, and the built-in ones that compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

from legoai.specs.models.configs import DeepSeekConfig, GPTConfig, LlamaConfig, MixtralConfig, ModelConfig
from legoai.specs.models.deepseek import DeepSeek
from legoai.specs.models.gpt import GPT
from legoai.specs.models.llama import Llama
from legoai.specs.models.mixtral import Mixtral

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
OURS = {
    "vocab_size": 256,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "max_seq_len": 256,
}
ROPE_OF_LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
GPT_SIZES = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT_OURS = {"vocab_size": 256, "max_seq_len": 64, "dim": 32, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Case(NamedTuple):
    """A class of `transformers` with fields of its config, and the built-in model that computes the same."""

    kind: str
    fields: dict[str, Any]
    config: ModelConfig

    def published(self) -> Any:
        """The model of `transformers`, whose values are all drawn, also those that usually begin as ones or zeros."""
        config = getattr(transformers, f"{self.kind}Config")(**self.fields)
        name = "GPT2LMHeadModel" if self.kind == "GPT2" else f"{self.kind}ForCausalLM"
        torch.manual_seed(1)
        model = getattr(transformers, name)(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                nn.init.normal_(buffer, std=0.3)
        return model.eval()

    def own(self) -> nn.Module:
        """The built-in model, in double precision, and filled with what no file has."""
        makers: dict[type, Callable[[Any], nn.Module]] = {LlamaConfig: Llama, MixtralConfig: Mixtral, GPTConfig: GPT}
        makers[DeepSeekConfig] = DeepSeek
        model = makers[type(self.config)](self.config).double()
        for parameter in model.parameters():
            nn.init.constant_(parameter, torch.nan)
        return model


def _llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{**OURS, "rope_theta": 10_000.0, "norm_eps": 1e-6, **more})


def _mixtral(**more: Any) -> MixtralConfig:
    return MixtralConfig(**{**OURS, "n_experts": 4, "top_k": 2, **more})


_LATENT = {
    **SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "moe_intermediate_size": 16, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
_YARN_OF_V2 = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}


def _deepseek(**more: Any) -> DeepSeekConfig:
    dims = {
        "vocab_size": 256, "dim": 32, "dense_hidden_dim": 48, "hidden_dim": 16, "n_layers": 3, "n_dense_layers": 1,
        "n_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6,
        "n_experts": 8, "n_shared_experts": 2, "top_k": 2, "n_groups": 4, "top_groups": 2, "routed_scaling": 2.0,
        "max_seq_len": 256,
    }  # fmt: skip
    return DeepSeekConfig(**{**dims, **more})


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}

CASES: dict[str, Case] = {
    "llama": Case("Llama", SIZES, _llama()),
    "llama, stretched as Llama 3.1": Case(
        "Llama",
        {**SIZES, "rope_parameters": ROPE_OF_LLAMA},
        _llama(rope_theta=500_000.0, rope_scaling=8.0, rope_original_seq_len=64),
    ),
    "llama, stretched by YaRN": Case(
        "Llama",
        {**SIZES, "rope_parameters": YARN},
        _llama(rope_type="yarn", rope_scaling=4.0, rope_original_seq_len=64),
    ),
    "llama, stretched evenly": Case(
        "Llama",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
        _llama(rope_type="linear", rope_scaling=2.0),
    ),
    "llama, tied, wide heads, biases": Case(
        "Llama",
        {**SIZES, "tie_word_embeddings": True, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
        _llama(tie_embeddings=True, head_dim=16, attention_bias=True, mlp_bias=True),
    ),
    "qwen2": Case("Qwen2", SIZES, _llama(qkv_bias=True)),
    "qwen3": Case("Qwen3", {**SIZES, "head_dim": 16}, _llama(qk_norm=True, head_dim=16)),
    "mixtral": Case("Mixtral", {**SIZES, "num_local_experts": 4}, _mixtral()),
    "qwen3 with experts": Case(
        "Qwen3Moe", {**SIZES, "head_dim": 16, **_EXPERTS}, _mixtral(qk_norm=True, head_dim=16, rope_theta=10_000.0,
                                                                   norm_eps=1e-6)
    ),
    "deepseek v3": Case("DeepseekV3", _LATENT, _deepseek()),
    "deepseek v2, by YaRN, without a latent of queries": Case(
        "DeepseekV2", {**_LATENT, "q_lora_rank": None, "rope_parameters": _YARN_OF_V2, "topk_method":
                       "group_limited_greedy"},
        _deepseek(scores="softmax", normalize_weights=False, q_lora_rank=0, rope_scaling=4.0, rope_mscale=0.7,
                  rope_original_seq_len=64),
    ),
    "gpt2": Case("GPT2", GPT_SIZES, GPTConfig(**GPT_OURS)),
    "gpt2, untied": Case(
        "GPT2", {**GPT_SIZES, "tie_word_embeddings": False, "n_inner": 48},
        GPTConfig(**{**GPT_OURS, "hidden_dim": 48, "tie_embeddings": False}),
    ),
}  # fmt: skip


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a `transformers` or built-in model in double precision."""
    with torch.no_grad():
        found: Any = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def loaded(folder: Path) -> Any:
    """The model that `transformers` makes of a folder, in double precision."""
    config = transformers.AutoConfig.from_pretrained(folder)
    # Its grouped product of experts knows no double precision.
    experts = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **experts)
    return model.eval()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's files."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found
