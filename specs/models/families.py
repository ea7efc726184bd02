"""Families of built-in models that a plan can name, with their published sizes.

Importing this module is cheap and never imports torch.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import NamedTuple

from legoai.specs.models.config_checks import ConfigError, Scalar
from legoai.specs.models.configs import (
    STRETCHING_FIELDS,
    DeepSeekConfig,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    ModelConfig,
    ViTConfig,
)


def _llama31(dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> LlamaConfig:
    """Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3)."""
    return LlamaConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        hidden_dim=hidden_dim,
        vocab_size=128_256,
        max_seq_len=131_072,
        rope_scaling=8.0,
    )


_LLAMA3_8B = _llama31(4096, 32, 32, 14_336)

LLAMA3_PRESETS: Mapping[str, LlamaConfig] = types.MappingProxyType(
    {
        "tiny": LlamaConfig(
            dim=128, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=384, vocab_size=256, max_seq_len=1024
        ),
        # Llama 3.2, from the model cards' config.json: tied embeddings, rotary factor 32.
        "1b": replace(_LLAMA3_8B, dim=2048, n_layers=16, hidden_dim=8192, rope_scaling=32.0, tie_embeddings=True),
        "3b": replace(
            _LLAMA3_8B,
            dim=3072,
            n_layers=28,
            n_heads=24,
            hidden_dim=8192,
            rope_scaling=32.0,
            tie_embeddings=True,
        ),
        "8b": _LLAMA3_8B,
        "70b": _llama31(8192, 80, 64, 28_672),
        "405b": _llama31(16_384, 126, 128, 53_248),
    }
)


def _gpt(dim: int, n_layers: int, n_heads: int, max_seq_len: int) -> GPTConfig:
    return GPTConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        hidden_dim=4 * dim,
        vocab_size=50_257,
        max_seq_len=max_seq_len,
    )


# Radford et al. 2019, table 2; heads from the released hparams.json.
_GPT2_SMALL = _gpt(768, 12, 12, 1024)
_GPT2_MEDIUM = _gpt(1024, 24, 16, 1024)
_GPT2_LARGE = _gpt(1280, 36, 20, 1024)
_GPT2_XL = _gpt(1600, 48, 25, 1024)

GPT2_PRESETS: Mapping[str, GPTConfig] = types.MappingProxyType(
    {
        "small": _GPT2_SMALL,
        "124m": _GPT2_SMALL,
        "medium": _GPT2_MEDIUM,
        "355m": _GPT2_MEDIUM,
        "large": _GPT2_LARGE,
        "774m": _GPT2_LARGE,
        "xl": _GPT2_XL,
        "1.5b": _GPT2_XL,
    }
)

# Brown et al. 2020, table 2.1, with two of its rows made whole: "1.3b" is printed with 24 heads of 128 features
# in a width of 2048 (16 fit), "13b" with a width of 5140 (40 heads of 128 features are 5120). Attention is dense.
GPT3_PRESETS: Mapping[str, GPTConfig] = types.MappingProxyType(
    {
        "125m": _gpt(768, 12, 12, 2048),
        "350m": _gpt(1024, 24, 16, 2048),
        "760m": _gpt(1536, 24, 16, 2048),
        "1.3b": _gpt(2048, 24, 16, 2048),
        "2.7b": _gpt(2560, 32, 32, 2048),
        "6.7b": _gpt(4096, 32, 32, 2048),
        "13b": _gpt(5120, 40, 40, 2048),
        "175b": _gpt(12_288, 96, 96, 2048),
    }
)

# Jiang et al. 2024, "Mixtral of Experts", table 1; 8x22B from its released config.json.
MIXTRAL_PRESETS: Mapping[str, MixtralConfig] = types.MappingProxyType(
    {
        "tiny": MixtralConfig(
            dim=128,
            n_layers=4,
            n_heads=8,
            n_kv_heads=4,
            hidden_dim=256,
            n_experts=4,
            top_k=2,
            vocab_size=256,
            max_seq_len=1024,
        ),
        "8x7b": MixtralConfig(
            dim=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            hidden_dim=14_336,
            n_experts=8,
            top_k=2,
            vocab_size=32_000,
            max_seq_len=32_768,
        ),
        "8x22b": MixtralConfig(
            dim=6144,
            n_layers=56,
            n_heads=48,
            n_kv_heads=8,
            hidden_dim=16_384,
            n_experts=8,
            top_k=2,
            vocab_size=32_000,
            max_seq_len=65_536,
        ),
    }
)

# DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.2 and appendix B (Lite), and "DeepSeek-V3 Technical Report", section 4.2;
# scaling of positions and of routed weights from the released config.json. Multi-token prediction is left out.
_DEEPSEEK_V2 = DeepSeekConfig(
    dim=5120,
    n_layers=60,
    n_dense_layers=1,
    n_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_head_dim=128,
    rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=12_288,
    hidden_dim=1536,
    n_experts=160,
    n_shared_experts=2,
    top_k=6,
    n_groups=8,
    top_groups=3,
    scores="softmax",
    normalize_weights=False,
    routed_scaling=16.0,
    vocab_size=102_400,
    max_seq_len=163_840,
    rope_scaling=40.0,
    rope_mscale=0.707,
)

DEEPSEEK_PRESETS: Mapping[str, DeepSeekConfig] = types.MappingProxyType(
    {
        "tiny": DeepSeekConfig(
            dim=128,
            n_layers=4,
            n_dense_layers=1,
            n_heads=8,
            q_lora_rank=48,
            kv_lora_rank=32,
            nope_head_dim=16,
            rope_head_dim=8,
            v_head_dim=16,
            dense_hidden_dim=256,
            hidden_dim=64,
            n_experts=8,
            n_shared_experts=1,
            top_k=2,
            n_groups=4,
            top_groups=2,
            routed_scaling=2.5,
            vocab_size=256,
            max_seq_len=1024,
        ),
        "v2_lite": replace(
            _DEEPSEEK_V2,
            dim=2048,
            n_layers=27,
            n_heads=16,
            q_lora_rank=0,
            dense_hidden_dim=10_944,
            hidden_dim=1408,
            n_experts=64,
            n_groups=1,
            top_groups=1,
            routed_scaling=1.0,
        ),
        "v2": _DEEPSEEK_V2,
        "v3": replace(
            _DEEPSEEK_V2,
            dim=7168,
            n_layers=61,
            n_dense_layers=3,
            dense_hidden_dim=18_432,
            hidden_dim=2048,
            n_experts=256,
            n_shared_experts=1,
            top_k=8,
            top_groups=4,
            scores="sigmoid",
            normalize_weights=True,
            routed_scaling=2.5,
            vocab_size=129_280,
            rope_mscale=1.0,
        ),
    }
)

# Dosovitskiy et al. 2021, table 1.
VIT_PRESETS: Mapping[str, ViTConfig] = types.MappingProxyType(
    {
        "tiny": ViTConfig(dim=64, n_layers=2, n_heads=4, hidden_dim=256, patch_size=8, image_size=32, n_classes=10),
        "b16": ViTConfig(dim=768, n_layers=12, n_heads=12, hidden_dim=3072, patch_size=16),
        "l16": ViTConfig(dim=1024, n_layers=24, n_heads=16, hidden_dim=4096, patch_size=16),
        "h14": ViTConfig(dim=1280, n_layers=32, n_heads=16, hidden_dim=5120, patch_size=14),
    }
)


class Family(NamedTuple):
    """One name that a plan's `model` statement may use."""

    config_class: type[ModelConfig]
    presets: Mapping[str, ModelConfig]
    module: str
    """Dotted name of the module that defines the model; importing it imports torch."""
    class_name: str
    """Class in `module`, called as `class_name(config)`."""
    doc: str


FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {
        "llama3": Family(
            config_class=LlamaConfig,
            presets=LLAMA3_PRESETS,
            module="legoai.specs.models.llama",
            class_name="Llama",
            doc="Llama 3.1 and 3.2 decoder: grouped-query attention, rotary positions, SwiGLU",
        ),
        "gpt2": Family(
            config_class=GPTConfig,
            presets=GPT2_PRESETS,
            module="legoai.specs.models.gpt",
            class_name="GPT",
            doc="GPT-2 decoder: learned positions, LayerNorm, GELU, tied embeddings",
        ),
        "gpt3": Family(
            config_class=GPTConfig,
            presets=GPT3_PRESETS,
            module="legoai.specs.models.gpt",
            class_name="GPT",
            doc="GPT-3 decoder: GPT-2's architecture at GPT-3's sizes, with dense attention",
        ),
        "mixtral": Family(
            config_class=MixtralConfig,
            presets=MIXTRAL_PRESETS,
            module="legoai.specs.models.mixtral",
            class_name="Mixtral",
            doc="Mixtral decoder: Llama blocks whose feed-forward is a sparse mixture of experts",
        ),
        "deepseek": Family(
            config_class=DeepSeekConfig,
            presets=DEEPSEEK_PRESETS,
            module="legoai.specs.models.deepseek",
            class_name="DeepSeek",
            doc="DeepSeek-V2 and -V3 decoder: latent attention, dense blocks, then mixtures with shared experts",
        ),
        "vit": Family(
            config_class=ViTConfig,
            presets=VIT_PRESETS,
            module="legoai.specs.models.vit",
            class_name="ViT",
            doc="vision transformer for image classification",
        ),
    }
)


def config_values(config: ModelConfig) -> dict[str, Scalar]:
    """Return the config's fields and values in declaration order, as keyword arguments of its class."""
    return {item.name: getattr(config, item.name) for item in fields(config)}


def resolve_config(
    family: str, preset: str | None = None, overrides: Mapping[str, Scalar] | None = None
) -> ModelConfig:
    """Return the config that `family("preset")` with field overrides names.

    Args:
        family: a key of `FAMILIES`.
        preset: a key of that family's presets; without one, `overrides` must give every field that has no
            default.
        overrides: values of config fields, by name.

    Raises:
        ConfigError: the family, preset or a field is unknown, a required field is missing, a value has the
            wrong type, or the dimensions disagree.
    """
    overrides = overrides or {}
    if family not in FAMILIES:
        raise ConfigError("family", f"there is no built-in model named {family!r}", tuple(FAMILIES))
    chosen = FAMILIES[family]
    names = tuple(item.name for item in fields(chosen.config_class))
    for name in overrides:
        if name not in names:
            raise ConfigError(name, f"{family} has no field named {name!r}", names)
    if preset is None:
        values: dict[str, Scalar] = {}
        for item in fields(chosen.config_class):
            if item.default is MISSING and item.name not in overrides:
                raise ConfigError(
                    "preset",
                    f"{family} needs a preset, or a value for each of its dimensions: {item.name} is missing",
                    tuple(chosen.presets),
                )
    elif preset in chosen.presets:
        values = config_values(chosen.presets[preset])
        if overrides.get("rope_scaling") == 1:  # without the preset's stretching, what else it says of it is nothing
            values = {name: value for name, value in values.items() if name not in STRETCHING_FIELDS}
    else:
        raise ConfigError("preset", f"{family} has no preset named {preset!r}", tuple(chosen.presets))
    values.update(overrides)
    return chosen.config_class(**values)  # type: ignore[arg-type]  # checked field by field in __post_init__
