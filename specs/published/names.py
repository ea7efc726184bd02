"""Names and layouts that the weights of built-in models have in files of Hugging Face.

Rotary embeddings need no permutation: built-in models pair features of a head as those files do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from legoai.specs.models.configs import DeepSeekConfig, GPTConfig, LlamaConfig, MixtralConfig, ModelConfig
from legoai.specs.published.pieces import Pieces, stacked, whole

_AROUND: Final = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Final = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Modules of Llama, and those of a published one, around its blocks and in each."""

_LATENT_BLOCK: Final = {
    **_BLOCK,
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.router": "mlp.gate",
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
}
"""The same in a block of DeepSeek."""

_GPT_AROUND: Final = {
    "tok_embeddings": "transformer.wte",
    "pos_embeddings": "transformer.wpe",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT_BLOCK: Final = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_GPT_LINEAR: Final = {
    "attention.wq": ("attn.c_attn", 0),
    "attention.wk": ("attn.c_attn", 1),
    "attention.wv": ("attn.c_attn", 2),
    "attention.wo": ("attn.c_proj", 0),
    "mlp.up": ("mlp.c_fc", 0),
    "mlp.down": ("mlp.c_proj", 0),
}
"""Linear layers of GPT-2: the published layer, whose weight is transposed, and the number of layers before it there."""

_FUSED: Final = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
"""Experts in the memory layout of `transformers`: the stacked tensor, and the number of other weights before it."""


def has_map(config: object) -> bool:
    """Whether the names of a built-in model's weights in Hugging Face files are known."""
    return isinstance(config, LlamaConfig | MixtralConfig | DeepSeekConfig | GPTConfig)


def published(config: ModelConfig, name: str, shape: Sequence[int]) -> Iterator[Pieces]:
    """Yield each published form of a tensor of a built-in model, the usual one first.

    Args:
        config: of a model that has a mapping.
        name: of its tensor.
        shape: full shape of its tensor.
    """
    assert has_map(config), "asked before"
    module, _, kind = name.rpartition(".")
    if isinstance(config, GPTConfig):
        yield from _of_gpt(module, kind, shape)
    elif ".feed_forward.experts" in module:
        yield from _of_experts(config, module, kind, shape)
    elif kind == "selection_bias":
        yield whole(f"{_published_block(module)}.mlp.gate.e_score_correction_bias", shape)
    elif isinstance(config, DeepSeekConfig) and module not in _AROUND:
        yield whole(f"{_published_block(module)}.{_LATENT_BLOCK[_in_block(module)]}.{kind}", shape)
    elif module.endswith("feed_forward.router"):
        block = _published_block(module)
        yield from (whole(f"{block}.{place}.gate.{kind}", shape) for place in _experts_of(config))
    elif module in _AROUND:
        yield whole(f"{_AROUND[module]}.{kind}", shape)
    else:
        yield whole(f"{_published_block(module)}.{_BLOCK[_in_block(module)]}.{kind}", shape)


def _in_block(module: str) -> str:
    return module.split(".", 2)[2]


def _published_block(module: str) -> str:
    return f"model.layers.{module.split('.')[1]}"


def _of_gpt(module: str, kind: str, shape: Sequence[int]) -> Iterator[Pieces]:
    if module in _GPT_AROUND:
        yield whole(f"{_GPT_AROUND[module]}.{kind}", shape)
        return
    block, part = f"transformer.h.{module.split('.')[1]}", _in_block(module)
    if part in _GPT_BLOCK:
        yield whole(f"{block}.{_GPT_BLOCK[part]}.{kind}", shape)
        return
    place, before = _GPT_LINEAR[part]
    yield whole(f"{block}.{place}.{kind}", shape, transposed=kind == "weight", row=before * shape[0])


def _experts_of(config: object) -> tuple[str, ...]:
    """The published modules around experts, the usual one first: Mixtral's, or with `qk_norm` Qwen3's; DeepSeek's."""
    if isinstance(config, DeepSeekConfig):
        return ("mlp",)
    names = ("block_sparse_moe", "mlp")
    return names[::-1] if isinstance(config, MixtralConfig) and config.qk_norm else names


def _of_experts(config: object, module: str, kind: str, shape: Sequence[int]) -> Iterator[Pieces]:
    block = _published_block(module)
    of_qwen = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[kind]
    for place in _experts_of(config):
        layer = kind if place == "block_sparse_moe" else of_qwen
        yield stacked([f"{block}.{place}.experts.{index}.{layer}.weight" for index in range(shape[0])], shape)
    fused, before = _FUSED[kind]
    [piece] = whole(f"{block}.mlp.experts.{fused}", shape)
    yield (piece._replace(offset=(0, before * shape[1], 0)),)
