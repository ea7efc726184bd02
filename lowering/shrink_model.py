"""Dimensions of a small model with the same divisibility over ranks as the original one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from legoai.dsl.analysis.parallelism.experts import is_routed
from legoai.specs.directives.model import Model
from legoai.specs.models.config_checks import Scalar
from legoai.specs.models.configs import (
    DeepSeekConfig,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    ModelConfig,
    ViTConfig,
)
from legoai.specs.models.families import FAMILIES, config_values
from legoai.specs.models.manifest import Manifest
from legoai.specs.models.reads import Images, Tokens
from legoai.specs.plan import Plan

LARGEST_AS_IT_IS: Final = 20_000_000
"""Most parameters of a model from a factory, which only its author can shrink, that a few processes can train."""

VOCABULARY: Final = 256
"""Tokens are bytes."""

_PATCHES: Final = 2
"""Patches along the side of an image."""

_HEAD_DIM: Final = 8
_HEADS_OF_GROUP: Final = 16
_EXPERTS: Final = 4
_LATENT: Final = 12


class ModelTooLargeError(ValueError):
    """A model cannot be shrunk; the message gives a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Constraints on the smaller model: number of blocks, sequence lengths, and the axes' sizes in both plans."""

    kept: tuple[int, ...] | None
    """Indices of the blocks that are kept; None where the number of blocks is unchanged."""
    seq_len: int | None
    """None where the model reads no text."""
    tp: int
    """Ranks among which heads are divided, including `cp` where it attends by heads."""
    tp_now: int
    ep: int
    ep_now: int
    double: bool = False
    """Whether the smaller model computes in fp64."""

    @property
    def blocks(self) -> int | None:
        """Number of blocks; None where it is unchanged."""
        return None if self.kept is None else len(self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The dimensions that all decoders have."""

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 0
    """0 where there is no text."""


def shrunken_model(
    plan: Plan, manifest: Manifest, sizes: Sizes, config: Mapping[str, Any] | None, changes: list[str]
) -> tuple[Model, float]:
    """Return the smaller model, and the size of a block's parameters relative to the original.

    The heads of a rank, the query heads per key/value head, and the ratio of the feed-forward width to the model's stay
    the same. Sizes that `tp` does not divide stay indivisible.

    Raises:
        ModelTooLargeError: the model comes from a factory or a config of unknown dimensions, and is large.
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
        overrides = _huggingface(fields, manifest, sizes, str(source))
        changes.append(_summary(fields, overrides))
        if sizes.double and any(info.kind == "experts" and is_routed(info) for info in manifest.modules.values()):
            overrides["experts_implementation"] = "batched_mm"
            changes.append("model: experts by batched products, since grouped ones have no fp64")
        width = next((name for name in ("hidden_size", "n_embd") if name in overrides and name in fields), None)
        ratio = 1.0 if width is None else (int(overrides[width]) / int(fields[width])) ** 2
        return _named(model, {**source.arguments, **overrides}), ratio
    _check_size(
        manifest,
        f"{source} has {manifest.parameter_count:,} parameters, and only its author can make it smaller: give the "
        f"factory arguments through `let` names, and `--set` them so that there are at most {LARGEST_AS_IT_IS:,}",
    )
    changes.append(f"model: {source} as it is, with {manifest.parameter_count:,} parameters")
    return model, 1.0


def _check_size(manifest: Manifest, message: str) -> None:
    if manifest.parameter_count > LARGEST_AS_IT_IS:
        raise ModelTooLargeError(message)


def _named(model: Model, arguments: Mapping[str, Scalar]) -> Model:
    return Model(family=model.family, target=model.target, arguments=dict(arguments), origins=model.origins)


def _summary(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    words = [f"{name} {before[name]} → {value}" for name, value in after.items() if before.get(name, value) != value]
    return f"model: {', '.join(words)}" if words else "model: as it is"


def _builtin(config: ModelConfig, sizes: Sizes) -> ModelConfig:
    if isinstance(config, ViTConfig):
        return _vision(config, sizes)
    if isinstance(config, DeepSeekConfig):
        return _latent(config, sizes)
    kv_heads = config.n_heads if isinstance(config, GPTConfig) else config.n_kv_heads
    found = _shape(
        _Shape(
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
        common |= {"n_experts": _experts(config.n_experts, sizes), "top_k": min(config.top_k, 2)}
    return replace(config, **common)


def _latent(config: DeepSeekConfig, sizes: Sizes) -> DeepSeekConfig:
    """Heads, experts and groups of experts keep their divisibility; latents and features of a head are few.

    Widths that are equal are no longer: of queries and keys, of values, of the latents and of the model.
    """
    heads = _cut(config.n_heads, sizes, most=2)
    dim = heads * (_HEAD_DIM if heads <= 8 or heads % 2 else _HEAD_DIM // 2)
    experts = _experts(config.n_experts, sizes)
    groups = 2 if config.n_groups > 1 and experts % 2 == 0 and experts > 2 else 1
    top_groups = min(config.top_groups, groups)
    blocks = config.n_layers if sizes.blocks is None else sizes.blocks
    return replace(
        config,
        dim=dim,
        n_layers=blocks,
        n_dense_layers=min(config.n_dense_layers, blocks - 1),
        n_heads=heads,
        q_lora_rank=_LATENT + 4 if config.q_lora_rank else 0,
        kv_lora_rank=_LATENT,
        nope_head_dim=_HEAD_DIM,
        rope_head_dim=_HEAD_DIM // 2,
        v_head_dim=_HEAD_DIM,
        dense_hidden_dim=_multiple(dim * config.dense_hidden_dim / config.dim, 8 * sizes.tp_now),
        hidden_dim=_multiple(dim * config.hidden_dim / config.dim, 8 * sizes.tp_now),
        n_experts=experts,
        n_shared_experts=min(config.n_shared_experts, 2),
        top_k=min(config.top_k, 2, top_groups * (experts // groups)),
        n_groups=groups,
        top_groups=top_groups,
        vocab_size=VOCABULARY + (config.vocab_size % sizes.tp != 0),
        max_seq_len=sizes.seq_len or 1,
    )


def _vision(config: ViTConfig, sizes: Sizes) -> ViTConfig:
    found = _shape(
        _Shape(dim=config.dim, heads=config.n_heads, kv_heads=config.n_heads, hidden=config.hidden_dim), sizes
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
    several = range(_PATCHES, _PATCHES + sizes.tp_now)
    if tokens % sizes.tp:
        return _PATCHES
    return next((side for side in several if (side * side + 1) % sizes.tp_now == 0), _PATCHES)


def _shape(whole: _Shape, sizes: Sizes) -> _Shape:
    group = min(max(1, whole.heads // whole.kv_heads), _HEADS_OF_GROUP)
    kv_heads = _cut(whole.kv_heads, sizes, most=2)
    heads = kv_heads * group
    # Multiples of 8, which grouped kernels require, also for each rank's share.
    dim = heads * (_HEAD_DIM if heads <= 8 or heads % 2 else _HEAD_DIM // 2)
    hidden = _multiple(dim * whole.hidden / whole.dim, 8 * sizes.tp_now)
    vocab = VOCABULARY + (whole.vocab % sizes.tp != 0)
    return _Shape(dim=dim, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=vocab)


def _cut(whole: int, sizes: Sizes, *, most: int) -> int:
    """Return a number with as many per rank of `tp` as before, at most ``most``; indivisible by `tp` if it was."""
    each, rest = divmod(whole, sizes.tp)
    return min(whole, most) if rest else min(each, most) * sizes.tp_now


def _experts(whole: int, sizes: Sizes) -> int:
    """Return a number of experts such that a token does not visit all of them, and that `ep` divides."""
    return min(whole, _multiple(_EXPERTS, sizes.ep_now))


def _multiple(value: float, of: int) -> int:
    return of * max(1, math.ceil(value / of))


_LLAMA_NAMES: Final = {
    "dim": "hidden_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
_GPT2_NAMES: Final = {
    "dim": "n_embd",
    "blocks": "n_layer",
    "heads": "n_head",
    "kv_heads": "n_head",
    "hidden": "n_inner",
    "vocab": "vocab_size",
    "positions": "n_positions",
}


def _huggingface(fields: Mapping[str, Any], manifest: Manifest, sizes: Sizes, source: str) -> dict[str, Scalar]:
    """Return the fields of a config file that change, under the file's own names."""
    reads = manifest.reads
    if reads is None or isinstance(reads, Tokens):
        return _decoder(fields, manifest, sizes)
    without_dropout = {name: value for name, value in _clean(fields, None).items() if name in fields}
    if isinstance(reads, Images) and _is_vision(fields):
        return without_dropout | _vision_fields(fields, sizes)
    if fields.get("model_type") == "t5":
        return without_dropout | _t5_fields(fields, manifest, sizes)
    _check_size(
        manifest,
        f"{source} has {manifest.parameter_count:,} parameters, and its config is not one that can be made smaller: "
        f"name one of at most {LARGEST_AS_IT_IS:,} parameters",
    )
    return without_dropout


def keeps_blocks(plan: Plan, manifest: Manifest, config: Mapping[str, Any] | None) -> bool:
    """Whether the number of the model's blocks cannot be changed by a field of its config."""
    if plan.model.family != "huggingface" or isinstance(manifest.reads, Tokens):
        return False
    return not (isinstance(manifest.reads, Images) and _is_vision({**(config or {}), **plan.model.arguments}))


def _is_vision(fields: Mapping[str, Any]) -> bool:
    return all(isinstance(fields.get(name), int) for name in _VISION_NAMES.values())


_VISION_NAMES: Final = {
    "dim": "hidden_size",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "blocks": "num_hidden_layers",
    "patch": "patch_size",
}


def _vision_fields(fields: Mapping[str, Any], sizes: Sizes) -> dict[str, Scalar]:
    dim, heads, hidden, _, patch = (int(fields[name]) for name in _VISION_NAMES.values())
    found = _shape(_Shape(dim=dim, heads=heads, kv_heads=heads, hidden=hidden), sizes)
    values: dict[str, Scalar] = {
        "hidden_size": found.dim,
        "num_attention_heads": found.heads,
        "intermediate_size": found.hidden,
        "image_size": _PATCHES * patch,
    }
    return values if sizes.blocks is None else {**values, "num_hidden_layers": sizes.blocks}


def _t5_fields(fields: Mapping[str, Any], manifest: Manifest, sizes: Sizes) -> dict[str, Scalar]:
    """Heads and feed-forward as for a decoder; the stacks keep their blocks."""
    dim, heads, hidden = (int(fields[name]) for name in ("d_model", "num_heads", "d_ff"))
    vocab = int(fields.get("vocab_size") or manifest.vocab_size or VOCABULARY)
    found = _shape(_Shape(dim=dim, heads=heads, kv_heads=heads, hidden=hidden, vocab=vocab), sizes)
    ids = {name: value for name, value in _clean(fields, found.vocab).items() if name.endswith("_token_id")}
    return {
        "d_model": found.dim,
        "num_heads": found.heads,
        "d_kv": found.dim // found.heads,
        "d_ff": found.hidden,
        "vocab_size": found.vocab,
        "dropout_rate": 0.0,  # 0.1 by default
        **ids,
    }


def _decoder(fields: Mapping[str, Any], manifest: Manifest, sizes: Sizes) -> dict[str, Scalar]:
    names = _GPT2_NAMES if "n_embd" in fields or fields.get("model_type") == "gpt2" else _LLAMA_NAMES
    whole = _described(fields, names, manifest)
    found = _shape(whole, sizes)
    values: dict[str, Scalar] = {
        names["dim"]: found.dim,
        names["heads"]: found.heads,
        names["hidden"]: found.hidden,
        names["vocab"]: found.vocab,
        names["positions"]: sizes.seq_len or 1,
    }
    if sizes.blocks is not None:
        values[names["blocks"]] = sizes.blocks
    if names["kv_heads"] in fields:
        values[names["kv_heads"]] = found.kv_heads
    if "head_dim" in fields:
        values["head_dim"] = found.dim // found.heads
    for name in ("num_local_experts", "num_experts"):
        if isinstance(fields.get(name), int):
            values[name] = _experts(fields[name], sizes)
    return values | _clean(fields, found.vocab)


def _clean(fields: Mapping[str, Any], vocab: int | None) -> dict[str, Scalar]:
    """Return the fields without dropout, which differs between meshes, and without token ids beyond the vocabulary."""
    values: dict[str, Scalar] = {}
    for name, value in fields.items():
        if name.endswith(_DROPOUTS) and isinstance(value, float) and value:
            values[name] = 0.0
        if vocab is not None and name.endswith("_token_id") and isinstance(value, int) and value >= vocab:
            values[name] = vocab - 1
    return values


_DROPOUTS: Final = ("dropout", "pdrop", "dropout_rate", "dropout_prob", "drop_path_rate")


def _described(fields: Mapping[str, Any], names: Mapping[str, str], manifest: Manifest) -> _Shape:
    """Return the original model's dimensions, from the file or, where it relies on defaults, from the manifest."""
    attention = next((item for item in manifest.modules.values() if item.kind == "attention"), None)
    told = attention.attributes if attention is not None else {}
    embedding = next((item for item in manifest.modules.values() if item.kind == "embedding"), None)
    width = embedding.attributes.get("embedding_dim") if embedding is not None else None
    dim = int(fields.get(names["dim"]) or width or 64)
    heads = int(fields.get(names["heads"]) or told.get("n_heads") or 4)
    return _Shape(
        dim=dim,
        heads=heads,
        kv_heads=int(fields.get(names["kv_heads"]) or told.get("n_kv_heads") or heads),
        hidden=int(fields.get(names["hidden"]) or 4 * dim),
        vocab=int(fields.get(names["vocab"]) or manifest.vocab_size or VOCABULARY),
    )
