"""Dimensions of a small model with the same divisibility over ranks as the original one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legoai.dsl.analysis.parallelism.experts import ROUTED
from legoai.lowering.shrink_config import smaller_fields
from legoai.lowering.shrink_sizes import (
    HEAD_DIM,
    LARGEST_AS_IT_IS,
    LATENT,
    PATCHES,
    Shape,
    Sizes,
    check_size,
    cut,
    experts_of,
    multiple,
    shape_of,
    vocabulary_of,
)
from legoai.specs.directives.model import Model
from legoai.specs.models.configs import (
    DeepSeekConfig,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    ModelConfig,
    ViTConfig,
)
from legoai.specs.models.families import FAMILIES, config_values
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo
from legoai.specs.plan import Plan


def shrunken_model(
    plan: Plan, manifest: Manifest, sizes: Sizes, config: Mapping[str, Any] | None, changes: list[str]
) -> tuple[Model, float]:
    """Return the smaller model, and the size of a block's parameters relative to the original.

    The heads of a rank, the query heads per key/value head, and the ratio of the feed-forward width to the model's stay
    the same. Sizes that `tp` does not divide stay indivisible.

    Raises:
        CannotShrinkError: the model comes from a factory or a config of unknown dimensions, and is large.
    """
    model, source = plan.model, plan.model.source()
    if source.kind == "builtin":
        before = source.config()
        after = _builtin(before, sizes)
        preset = config_values(FAMILIES[source.target].presets[source.preset]) if source.preset is not None else {}
        arguments = {name: value for name, value in config_values(after).items() if preset.get(name) != value}
        changes.append(_summary(config_values(before), config_values(after)))
        return _named(model, arguments), (after.dim / before.dim) ** 2
    if source.kind == "huggingface":
        fields = {**(config or {}), **source.arguments}
        overrides, ratio = smaller_fields(fields, manifest, sizes, str(source))
        changes.append(_summary(fields, overrides))
        if sizes.double and any(map(_has_products_by_group, manifest.modules.values())):
            overrides["experts_implementation"] = "batched_mm"
            changes.append("model: experts by batched products, since grouped ones have no fp64")
        return _named(model, {**source.arguments, **overrides}), ratio
    check_size(
        manifest,
        f"{source} has {manifest.parameter_count:,} parameters, and only its author can make it smaller: give the "
        f"factory arguments through `let` names, and `--set` them so that there are at most {LARGEST_AS_IT_IS:,}",
    )
    changes.append(f"model: {source} as it is, with {manifest.parameter_count:,} parameters")
    return model, 1.0


def _named(model: Model, arguments: Mapping[str, Any]) -> Model:
    return Model(family=model.family, target=model.target, arguments=dict(arguments), origins=model.origins)


def _has_products_by_group(info: ModuleInfo) -> bool:
    """Whether a module is experts of `transformers`, which get tokens, the experts of each, and their weights."""
    return info.kind == "experts" and len((*info.inputs, *info.keyword_inputs)) == len(ROUTED)


def _summary(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    words = list(_changes(before, after))
    return f"model: {', '.join(words)}" if words else "model: as it is"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in after.items():
        old = before.get(name, value)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            yield from _changes(old, value, f"{prefix}{name}.")
        elif isinstance(old, list) and isinstance(value, list) and len(old) != len(value):
            yield f"{prefix}{name} of {len(value)} instead of {len(old)} elements"
        elif old != value:
            yield f"{prefix}{name} {old} → {value}"


def _builtin(config: ModelConfig, sizes: Sizes) -> ModelConfig:
    if isinstance(config, ViTConfig):
        return _vision(config, sizes)
    if isinstance(config, DeepSeekConfig):
        return _latent(config, sizes)
    kv_heads = config.n_heads if isinstance(config, GPTConfig) else config.n_kv_heads
    found = shape_of(
        Shape(
            dim=config.dim,
            heads=config.n_heads,
            kv_heads=kv_heads,
            hidden=config.hidden_dim,
            vocab=config.vocab_size,
        ),
        sizes,
    )
    common: dict[str, Any] = {
        "dim": found.dim,
        "n_layers": config.n_layers if sizes.blocks is None else sizes.blocks,
        "n_heads": found.heads,
        "hidden_dim": found.hidden,
        "vocab_size": found.vocab,
        "max_seq_len": sizes.seq_len or 1,
    }
    if not isinstance(config, GPTConfig):
        common["n_kv_heads"] = found.kv_heads
    if isinstance(config, LlamaConfig | MixtralConfig) and config.head_dim:
        # Twice as wide as by default, so that the two sizes stay unequal.
        common["head_dim"] = 2 * (found.dim // found.heads)
    if isinstance(config, MixtralConfig):
        common |= {"n_experts": experts_of(config.n_experts, sizes), "top_k": min(config.top_k, 2)}
    return replace(config, **common)


def _latent(config: DeepSeekConfig, sizes: Sizes) -> DeepSeekConfig:
    """Heads, experts and groups of experts keep their divisibility; latents and features of a head are few.

    Widths that are equal are no longer: of queries and keys, of values, of the latents and of the model.
    """
    heads = cut(config.n_heads, sizes, most=2)
    dim = heads * (HEAD_DIM if heads <= 8 or heads % 2 else HEAD_DIM // 2)
    experts = experts_of(config.n_experts, sizes)
    groups = 2 if config.n_groups > 1 and experts % 2 == 0 and experts > 2 else 1
    top_groups = min(config.top_groups, groups)
    kept = range(config.n_layers) if sizes.kept is None else sizes.kept
    dense = sum(index < config.n_dense_layers for index in kept)
    return replace(
        config,
        dim=dim,
        n_layers=len(kept),
        n_dense_layers=min(dense, len(kept) - 1),
        n_heads=heads,
        q_lora_rank=LATENT + 4 if config.q_lora_rank else 0,
        kv_lora_rank=LATENT,
        nope_head_dim=HEAD_DIM,
        rope_head_dim=HEAD_DIM // 2,
        v_head_dim=HEAD_DIM,
        dense_hidden_dim=multiple(dim * config.dense_hidden_dim / config.dim, 8 * sizes.tp_now),
        hidden_dim=multiple(dim * config.hidden_dim / config.dim, 8 * sizes.tp_now),
        n_experts=experts,
        n_shared_experts=min(config.n_shared_experts, 2),
        top_k=min(config.top_k, 2, top_groups * (experts // groups)),
        n_groups=groups,
        top_groups=top_groups,
        vocab_size=vocabulary_of(config.vocab_size, sizes),
        max_seq_len=sizes.seq_len or 1,
    )


def _vision(config: ViTConfig, sizes: Sizes) -> ViTConfig:
    found = shape_of(
        Shape(dim=config.dim, heads=config.n_heads, kv_heads=config.n_heads, hidden=config.hidden_dim), sizes
    )
    return replace(
        config,
        dim=found.dim,
        n_layers=config.n_layers if sizes.blocks is None else sizes.blocks,
        n_heads=found.heads,
        hidden_dim=found.hidden,
        image_size=_patches(config.n_tokens, sizes) * config.patch_size,
    )


def _patches(tokens: int, sizes: Sizes) -> int:
    """Return a number of patches along a side that preserves divisibility by `tp`, including the class token."""
    several = range(PATCHES, PATCHES + sizes.tp_now)
    if tokens % sizes.tp:
        return PATCHES
    return next((side for side in several if (side * side + 1) % sizes.tp_now == 0), PATCHES)
