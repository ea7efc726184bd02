"""Names of models and their modules in other tools and other authors' models, with the built-in equivalents.

It is imported when a name is unknown, never for a plan without errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

_SAME_MODULES: Final = (
    "tok_embeddings embed_tokens wte word_embeddings token_embedding token_embeddings embeddings embed_in embedding",
    "pos_embeddings wpe position_embeddings position_embedding",
    "layers h blocks block transformer_layers",
    "attention self_attn self_attention attn",
    "wq q_proj query linear_q to_q",
    "wk k_proj key linear_k to_k",
    "wv v_proj value linear_v to_v",
    "wo o_proj out_proj c_proj dense linear_proj to_out",
    "feed_forward mlp ffn block_sparse_moe moe",
    "w1 gate_proj",
    "w3 up up_proj c_fc fc1 linear_fc1",
    "w2 down down_proj c_proj fc2 linear_fc2",
    "attention_norm input_layernorm ln_1 attn_norm norm1",
    "ffn_norm mlp_norm post_attention_layernorm pre_mlp_layernorm ln_2 norm2",
    "wq_a q_a_proj linear_q_down_proj",
    "wq_b q_b_proj linear_q_up_proj",
    "wkv_b kv_b_proj linear_kv_up_proj",
    "wkv_a kv_a_proj_with_mqa kv_a_proj linear_kv_down_proj",
    "shared shared_experts shared_expert",
    "norm final_layernorm ln_f final_norm",
    "output lm_head output_layer embed_out head",
    "router gate wg",
    "experts local_experts",
)
"""Names of one module in the models of different authors."""

_PARTS: Final = {
    **dict.fromkeys(("qkv_proj", "linear_qkv", "query_key_value", "c_attn", "wqkv"), ("wq", "wk", "wv")),
    **dict.fromkeys(("gate_up_proj", "w13", "linear_fc1"), ("w1", "w3")),
}
"""Modules of other models that are several here."""

_AROUND: Final = ("model", "transformer", "decoder", "module", "_orig_mod", "gpt_neox", "backbone", "language_model")
"""Other tools' names of modules that contain a whole model."""

_MODELS: Final = {
    "llama3": re.compile(r"llama-?3(?:[.\d]|-\d(?!\d*b))*-?(\d+b)"),
    "mixtral": re.compile(r"mixtral-?(8x\d+b)"),
    "deepseek": re.compile(r"deepseek-?(v3|v2-lite|v2)"),
    "gpt2": re.compile(r"gpt-?2-?(small|medium|large|xl|124m|355m|774m|1\.5b)?"),
    "gpt3": re.compile(r"gpt-?3-([\d.]+[mb])"),
}
"""Names of models as the hub, papers and other tools write them."""


def our_model(name: str) -> str | None:
    """The built-in model, as a plan writes it, that has a name such as ``meta-llama/Llama-3.1-8B-Instruct``."""
    from legoai.specs.models.families import FAMILIES

    low = re.sub(r"[_(\"]+", "-", name.lower().rpartition("/")[2])
    for family, form in _MODELS.items():
        found = form.search(low)
        preset = found and (found[1] or "small").replace("-", "_")
        if preset in FAMILIES[family].presets:
            return f'{family}("{preset}")'
    return None


def our_modules(name: str, legal: Sequence[str]) -> list[str]:
    """Those of ``legal`` that are, in other models, the module ``name``; none where there are none."""
    if set(_PARTS.get(name, ())) & set(legal) and name not in legal:
        return [part for part in _PARTS[name] if part in legal]
    for row in _SAME_MODULES:
        names = row.split()
        if name in names:
            found = [item for item in names if item in legal]
            if found:
                return found[:1]
    return []


def around() -> Iterator[str]:
    """Names of modules that contain a whole model in other tools."""
    yield from _AROUND
