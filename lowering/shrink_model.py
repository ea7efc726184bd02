"""What are the dimensions of a small model that can be cut as a large one is?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from legoai.specs.directives.model import Model
from legoai.specs.models.configs import (
    FAMILIES,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    ModelConfig,
    Scalar,
    config_values,
)
from legoai.specs.models.manifest import Manifest
from legoai.specs.plan import Plan

LARGEST_AS_IT_IS: Final = 20_000_000
"""Parameters of a factory's model, which nobody else can make smaller, that a few processes of one machine train."""

VOCABULARY: Final = 256
"""Tokens are bytes."""

_HEAD_DIM: Final = 8
_HEADS_OF_GROUP: Final = 16
_EXPERTS: Final = 4


class ModelTooLargeError(ValueError):
    """A model that cannot be made smaller; the message says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the smaller model must fit: its number of blocks, its sequences, and how both plans cut it."""

    blocks: int | None
    """None where the number of blocks stays."""
    seq_len: int
    tp: int
    tp_now: int
    ep: int
    ep_now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The dimensions that all decoders have."""

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int


def shrunken_model(
    plan: Plan, manifest: Manifest, sizes: Sizes, config: Mapping[str, Any] | None, changes: list[str]
) -> tuple[Model, float]:
    """The smaller model, and the size of a block's parameters as a share of the whole model's.

    The number of heads of a rank, the query heads of a key/value head and the width of the feed-forward as a multiple
    of the model's stay; what `tp` does not divide is not divided after.

    Raises:
        ModelTooLargeError: the model comes from a factory, and is large.
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
        overrides = _huggingface(fields, manifest, sizes)
        changes.append(_summary(fields, overrides))
        width = next((name for name in ("hidden_size", "n_embd") if name in overrides and name in fields), None)
        ratio = 1.0 if width is None else (int(overrides[width]) / int(fields[width])) ** 2
        return _named(model, {**source.arguments, **overrides}), ratio
    if manifest.parameter_count > LARGEST_AS_IT_IS:
        raise ModelTooLargeError(
            f"{source} has {manifest.parameter_count:,} parameters, and only its author can make it smaller: give the "
            f"factory arguments through `let` names, and `--set` them so that there are at most {LARGEST_AS_IT_IS:,}"
        )
    changes.append(f"model: {source} as it is, with {manifest.parameter_count:,} parameters")
    return model, 1.0


def _named(model: Model, arguments: Mapping[str, Scalar]) -> Model:
    return Model(family=model.family, target=model.target, arguments=dict(arguments), origins=model.origins)


def _summary(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    words = [f"{name} {before[name]} → {value}" for name, value in after.items() if before.get(name, value) != value]
    return f"model: {', '.join(words)}" if words else "model: as it is"


def _builtin(config: ModelConfig, sizes: Sizes) -> LlamaConfig | MixtralConfig | GPTConfig:
    assert isinstance(config, LlamaConfig | MixtralConfig | GPTConfig), "what trains on tokens"
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
        "max_seq_len": sizes.seq_len,
    }
    if not isinstance(config, GPTConfig):
        common["n_kv_heads"] = found.kv_heads
    if isinstance(config, MixtralConfig):
        common |= {"n_experts": _experts(config.n_experts, sizes), "top_k": min(config.top_k, 2)}
    return replace(config, **common)


def _shape(whole: _Shape, sizes: Sizes) -> _Shape:
    group = min(max(1, whole.heads // whole.kv_heads), _HEADS_OF_GROUP)
    kv_heads = _cut(whole.kv_heads, sizes, most=2)
    heads = kv_heads * group
    dim = heads * (_HEAD_DIM if heads <= 8 else _HEAD_DIM // 2)
    hidden = _multiple(dim * whole.hidden / whole.dim, 4 * sizes.tp_now)
    vocab = VOCABULARY + (whole.vocab % sizes.tp != 0)
    return _Shape(dim=dim, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=vocab)


def _cut(whole: int, sizes: Sizes, *, most: int) -> int:
    """So many that a rank of `tp` has as many as before, or ``most``; no multiple of `tp` where it was none."""
    each, rest = divmod(whole, sizes.tp)
    return min(whole, most) if rest else min(each, most) * sizes.tp_now


def _experts(whole: int, sizes: Sizes) -> int:
    """So many that a token does not visit them all, and that every rank of `ep` has as many as another."""
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


def _huggingface(fields: Mapping[str, Any], manifest: Manifest, sizes: Sizes) -> dict[str, Scalar]:
    """Fields of a config file that differ, under the names that the file itself uses."""
    names = _GPT2_NAMES if "n_embd" in fields or fields.get("model_type") == "gpt2" else _LLAMA_NAMES
    whole = _described(fields, names, manifest)
    found = _shape(whole, sizes)
    values: dict[str, Scalar] = {
        names["dim"]: found.dim,
        names["heads"]: found.heads,
        names["hidden"]: found.hidden,
        names["vocab"]: found.vocab,
        names["positions"]: sizes.seq_len,
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
    for name, value in fields.items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float) and value:
            values[name] = 0.0
        if name.endswith("_token_id") and isinstance(value, int) and value >= found.vocab:
            values[name] = found.vocab - 1
    return values


def _described(fields: Mapping[str, Any], names: Mapping[str, str], manifest: Manifest) -> _Shape:
    """The whole model's dimensions, from the file or, where it leaves them to defaults, from the manifest."""
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
