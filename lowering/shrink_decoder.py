"""Smaller values for the fields of a Hugging Face config of a causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from legoai.lowering.shrink_sizes import (
    HEAD_DIM,
    LATENT,
    Shape,
    Sizes,
    cut,
    experts_of,
    multiple,
    shape_of,
    vocabulary_of,
)

_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
_HIDDEN: Final = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
_MORE_HIDDEN: Final = ("moe_intermediate_size", "shared_expert_intermediate_size")
_POSITIONS: Final = ("max_position_embeddings", "max_seq_len")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K: Final = ("num_experts_per_tok", "experts_per_token", "moe_k")
_OF_LATENTS: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_STATES: Final = ("state_size", "num_heads", "head_dim", "n_groups", "expand")
_INDICES: Final = ("mlp_only_layers", "moe_layers")
"""Lists of blocks' indices; other lists of layers have an element per block."""

_STATES: Final = 16
_CHUNK: Final = 8


class DecoderConfig:
    """The config object that `transformers` makes of a file's fields: with defaults, and with what it derives.

    Attributes:
        fields: of the file.
        config: the object.
        unknown: the reason why the model's dimensions are not known; None if they are.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        from legoai.specs.models.huggingface import transformers_config

        self.fields = fields
        self.config = transformers_config(fields)
        self._aliases: Mapping[str, str] = getattr(type(self.config), "attribute_map", {})
        self.unknown = self._unknown()

    def _unknown(self) -> str | None:
        if self.config.get_text_config() is not self.config:
            return "its dimensions are fields of its text_config"
        heads = "num_heads" if self.has(*_OF_STATES) else "num_attention_heads"
        for name in ("hidden_size", heads, "num_hidden_layers", "vocab_size"):
            if self.number(name) is None:
                found = getattr(self.config, name, None)
                return f"it has no field {name}" if found is None else f"its {name} = {found!r} is not one number"
        return None

    def has(self, *names: str) -> bool:
        """Whether the class has all of these fields."""
        return all(self._settable(name) for name in names)

    def _settable(self, name: str) -> bool:
        return hasattr(self.config, name) and not isinstance(getattr(type(self.config), name, None), property)

    def number(self, *names: str) -> int | None:
        """Return the first of these fields that is an integer."""
        values = (getattr(self.config, name, None) for name in names)
        return next((value for value in values if type(value) is int), None)

    def setting(self, name: str, value: object) -> dict[str, Any]:
        """Return a value under all names that the file has for a field, or else under the class's own."""
        own = self._aliases.get(name, name)
        alike = {name, own, *(other for other, target in self._aliases.items() if target == own)}
        alike |= {"n_embed"} if name == "hidden_size" else set()  # of older files
        written = sorted(alike & self.fields.keys())
        return dict.fromkeys(written or [own], value)

    def first(self, names: tuple[str, ...], value: object) -> dict[str, Any]:
        """Return a value for the first of these fields that the class has; nothing where it has none."""
        return next((self.setting(name, value) for name in names if self._settable(name)), {})

    def per_block(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the fields that are lists with an element per block, including those that the class derives."""
        blocks = self.number("num_hidden_layers")
        for name, value in self.config.to_dict().items():
            listed = isinstance(value, list | tuple) and len(value) == blocks
            if listed and "layer" in name and name not in _INDICES:
                yield name, list(value)

    def kinds(self) -> list[object] | None:
        """Return for each block its elements of these lists; None where there are none."""
        columns = [values for _, values in self.per_block()]
        return [repr(row) for row in zip(*columns, strict=True)] if columns else None


def smaller_decoder(decoder: DecoderConfig, sizes: Sizes) -> tuple[dict[str, Any], float]:
    """Return the fields of a decoder's config that change, and the size of a block's parameters relative to before."""
    dim = decoder.number("hidden_size")
    assert dim is not None, "see `DecoderConfig.unknown`"
    values = _states(decoder, sizes) if decoder.has(*_OF_STATES) else _attention(decoder, dim, sizes)
    ratio = (next(values[name] for name in decoder.setting("hidden_size", 0)) / dim) ** 2
    vocab = next(values[name] for name in decoder.setting("vocab_size", 0))
    values |= decoder.first(_POSITIONS, sizes.seq_len or 1)
    if sizes.kept is not None:
        values |= decoder.setting("num_hidden_layers", len(sizes.kept))
        for name, elements in decoder.per_block():
            values |= decoder.setting(name, [elements[index] for index in sizes.kept])
        values |= _dense_blocks(decoder, sizes.kept)
    return values | smaller_ids({**decoder.config.to_dict(), **decoder.fields}, vocab), ratio


def _attention(decoder: DecoderConfig, dim: int, sizes: Sizes) -> dict[str, Any]:
    """Return the dimensions of a model of attention and feed-forwards."""
    config, heads = decoder.config, decoder.number("num_attention_heads")
    vocab = decoder.number("vocab_size")
    assert heads is not None
    assert vocab is not None
    one_kv = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    kv_heads = 1 if one_kv else decoder.number(*_KV_HEADS) or heads
    hidden = decoder.number(*_HIDDEN) or 4 * dim
    found = shape_of(Shape(dim=dim, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=vocab), sizes)
    values = {
        **decoder.setting("hidden_size", found.dim),
        **decoder.setting("num_attention_heads", found.heads),
        **decoder.first(_HIDDEN, found.hidden),
        **decoder.setting("vocab_size", found.vocab),
    }
    if not one_kv:
        values |= decoder.first(_KV_HEADS, found.kv_heads)
    for name in _MORE_HIDDEN:
        width = decoder.number(name)
        if width is not None:
            values |= decoder.setting(name, multiple(found.dim * width / dim, 8 * sizes.tp_now))
    embedded = decoder.number("word_embed_proj_dim")
    if embedded is not None:
        values |= decoder.setting("word_embed_proj_dim", found.dim if embedded == dim else found.dim // 2)
    values |= _experts(decoder, sizes)
    head_dim = before = decoder.number("head_dim") or dim // heads
    if decoder.has(*_OF_LATENTS):
        head_dim = HEAD_DIM // 2
        values |= _latents(decoder)
    else:
        # Twice as wide as by default where it was not the default, so that the two sizes stay unequal.
        head_dim = found.dim // found.heads * (1 if before == dim // heads else 2)
        if decoder.number("head_dim") is not None and decoder.has("head_dim"):
            values |= decoder.setting("head_dim", head_dim)
    return values | _rotated(decoder, before, head_dim)


def _latents(decoder: DecoderConfig) -> dict[str, Any]:
    """As `legoai.lowering.shrink_model` shrinks the built-in model with attention of latents."""
    values = {"kv_lora_rank": LATENT, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM // 2,
              "v_head_dim": HEAD_DIM}  # fmt: skip
    if decoder.number("q_lora_rank") is not None:
        values["q_lora_rank"] = LATENT + 4
    return {written: value for name in values for written, value in decoder.setting(name, values[name]).items()}


def _experts(decoder: DecoderConfig, sizes: Sizes) -> dict[str, Any]:
    whole = decoder.number(*_EXPERTS)
    if whole is None:
        return {}
    experts = experts_of(whole, sizes)
    most = min(2, experts)
    values = decoder.first(tuple(name for name in _EXPERTS if decoder.number(name) is not None), experts)
    groups, top_groups = decoder.number("n_group"), decoder.number("topk_group")
    if groups is not None and top_groups is not None:
        chosen_among = top_groups < groups
        groups = 2 if groups > 1 and experts % 2 == 0 and experts > 2 else 1
        top_groups = 1 if chosen_among else groups
        most = min(most, top_groups * (experts // groups))
        values |= decoder.setting("n_group", groups) | decoder.setting("topk_group", top_groups)
    for name in _TOP_K:
        visited = decoder.number(name)
        if visited is not None:
            values |= decoder.setting(name, min(visited, most))
    shared = decoder.number("n_shared_experts")
    return values if shared is None else values | decoder.setting("n_shared_experts", min(shared, 2))


def _dense_blocks(decoder: DecoderConfig, kept: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that say which blocks of a mixture have a feed-forward without experts."""
    values: dict[str, Any] = {}
    first, step = decoder.number("first_k_dense_replace"), decoder.number("decoder_sparse_step")
    if first is not None:
        values |= decoder.setting("first_k_dense_replace", sum(index < first for index in kept))
    for name in _INDICES:
        named = getattr(decoder.config, name, None)
        if isinstance(named, list | tuple):
            dense = [new for new, old in enumerate(kept) if old in named]
            if name == "mlp_only_layers" and step is not None and step > 1:
                dense = [new for new, old in enumerate(kept) if old in named or (old + 1) % step]
                values |= decoder.setting("decoder_sparse_step", 1)
            values |= decoder.setting(name, dense)
    return values


def _rotated(decoder: DecoderConfig, before: int, head_dim: int) -> dict[str, Any]:
    """Return the fields that say how many features of a head rotate, and how each of them does."""
    values: dict[str, Any] = {}
    rotary = decoder.number("rotary_dim")
    if rotary is not None:
        values |= decoder.setting("rotary_dim", _even(head_dim * rotary / before))
    nested = {name: decoder.fields[name] for name in ("rope_parameters", "rope_scaling") if name in decoder.fields}
    for name in ("partial_rotary_factor", "rotary_pct"):
        share = decoder.fields.get(name)
        if isinstance(share, float) and share < 1:
            values |= decoder.setting(name, _even(head_dim * share) / head_dim)
    config = getattr(decoder.config, "rope_parameters", None)
    share = config.get("partial_rotary_factor") if isinstance(config, Mapping) else None
    rotated = _even(head_dim * share) if isinstance(share, float) else head_dim
    for name, parameters in nested.items():
        smaller = _smaller_rope(parameters, head_dim, rotated // 2)
        if smaller != parameters:
            values[name] = smaller
    return values


def _smaller_rope(parameters: Any, head_dim: int, frequencies: int) -> Any:
    """Return the parameters of rotary positions, maybe of each kind of block, for fewer features of a head."""
    if not isinstance(parameters, Mapping):
        return parameters
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in ("long_factor", "short_factor") and isinstance(value, list):
            found[name] = value[:frequencies]
        elif name == "partial_rotary_factor" and isinstance(value, float) and value < 1:
            found[name] = _even(head_dim * value) / head_dim
        else:
            found[name] = _smaller_rope(value, head_dim, frequencies)
    return found


def _even(value: float) -> int:
    return max(2, 2 * round(value / 2))


def _states(decoder: DecoderConfig, sizes: Sizes) -> dict[str, Any]:
    """Return the dimensions of a model of state spaces with heads, as Mamba 2 is."""
    config, heads, groups = decoder.config, decoder.number("num_heads"), decoder.number("n_groups")
    vocab = decoder.number("vocab_size")
    assert heads is not None
    assert vocab is not None
    heads = 2 * cut(heads, sizes, most=2)
    values = {
        "num_heads": heads,
        "head_dim": HEAD_DIM,
        "hidden_size": int(heads * HEAD_DIM / config.expand),
        "state_size": _STATES,
        "n_groups": 2 if groups is not None and groups > 1 else 1,
        "vocab_size": vocabulary_of(vocab, sizes),
    }
    if decoder.number("chunk_size") is not None:
        values["chunk_size"] = _CHUNK
    return {written: value for name in values for written, value in decoder.setting(name, values[name]).items()}


def without_dropout(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates of dropout, which differs between meshes, as 0."""
    return {
        name: 0.0 for name, value in fields.items() if name.endswith(_DROPOUTS) and isinstance(value, float) and value
    }


_DROPOUTS: Final = ("dropout", "pdrop", "dropout_rate", "dropout_prob", "drop_path_rate")


def smaller_ids(fields: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """Return the token ids beyond the vocabulary as its last one."""
    return {
        name: vocab - 1
        for name, value in fields.items()
        if name.endswith("_token_id") and isinstance(value, int) and value >= vocab
    }
