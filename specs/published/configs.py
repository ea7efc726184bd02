"""Configs of Hugging Face for built-in models: written beside exported weights, compared with imported ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from legoai.specs.models.configs import DeepSeekConfig, GPTConfig, LlamaConfig, MixtralConfig, ModelConfig, ViTConfig


class NotPublishedError(ValueError):
    """A built-in model has no equivalent class in `transformers`; the message gives the reason."""


BUILTIN_FAMILIES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama3",
    "Qwen2ForCausalLM": "llama3",
    "Qwen3ForCausalLM": "llama3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "GPT2LMHeadModel": "gpt2",
}
"""The built-in families with configs that compute the same as a class of `transformers`."""


def published_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a `config.json` for a built-in model, all but the dtype.

    They have the names that every release of `transformers` reads.

    Raises:
        NotPublishedError: no class of `transformers` computes the same.
    """
    _check(config)
    return nearest_config(config)


def nearest_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of the nearest `config.json` for a built-in model, to compare them with those of weights."""
    if isinstance(config, GPTConfig):
        return _gpt(config)
    if isinstance(config, MixtralConfig):
        return _mixtral(config)
    if isinstance(config, DeepSeekConfig):
        return _deepseek(config)
    if isinstance(config, ViTConfig):
        return _vit(config)
    return _llama(config)


def _check(config: ModelConfig) -> None:
    """Check that a class of `transformers` computes the same.

    Raises:
        NotPublishedError: none does.
    """
    if isinstance(config, ViTConfig):
        raise NotPublishedError("no class of transformers is known to compute the same")
    if isinstance(config, GPTConfig) and not config.bias:
        raise NotPublishedError("GPT-2 of transformers has biases, and bias = false leaves them out")
    if isinstance(config, MixtralConfig):
        if config.qkv_bias:
            raise NotPublishedError("no class of transformers has qkv_bias with experts that are not shared")
        if config.attention_bias and not config.qk_norm:
            raise NotPublishedError("no class of transformers has attention_bias with experts, but without qk_norm")
    elif isinstance(config, DeepSeekConfig):
        if config.normalize_weights and config.scores != "sigmoid":
            raise NotPublishedError(
                "DeepSeek-V2 of transformers does not scale weights to sum to one: normalize_weights"
            )
        if config.norm_eps != _LATENT_EPS:
            raise NotPublishedError(
                f"DeepSeek of transformers adds {_LATENT_EPS} in norms of latents whatever norm_eps is"
            )
    elif isinstance(config, LlamaConfig):
        if (config.qk_norm or config.qkv_bias) and config.mlp_bias:
            raise NotPublishedError(f"no class of transformers has mlp_bias beside {_norm_or_bias(config)}")
        if config.qk_norm and config.qkv_bias:
            raise NotPublishedError(
                "no class of transformers has qk_norm and qkv_bias, but no bias of the fourth layer"
            )


def _llama(config: LlamaConfig) -> dict[str, Any]:
    found = {**_decoder(config), "rope_scaling": _rope_scaling(config)}
    if config.qk_norm:
        return {**found, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                "attention_bias": config.attention_bias, "use_sliding_window": False}  # fmt: skip
    if config.qkv_bias:
        return {**found, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    return {**found, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}  # fmt: skip


def _norm_or_bias(config: LlamaConfig) -> str:
    return "qk_norm" if config.qk_norm else "qkv_bias"


def _mixtral(config: MixtralConfig) -> dict[str, Any]:
    found = {**_decoder(config), "num_experts_per_tok": config.top_k, "rope_scaling": None}
    if config.qk_norm:
        return {**found, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                "attention_bias": config.attention_bias, "use_sliding_window": False, "norm_topk_prob": True,
                "num_experts": config.n_experts, "moe_intermediate_size": config.hidden_dim,
                "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    return {**found, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": config.n_experts, "sliding_window": None}  # fmt: skip


def _deepseek(config: DeepSeekConfig) -> dict[str, Any]:
    biased = config.scores == "sigmoid"
    scaling = None
    if config.rope_scaling > 1:
        scaling = {"rope_type": "yarn", "factor": config.rope_scaling, "mscale": config.rope_mscale,
                   "mscale_all_dim": config.rope_mscale, "beta_fast": config.rope_beta_fast,
                   "beta_slow": config.rope_beta_slow,
                   "original_max_position_embeddings": config.rope_original_seq_len}  # fmt: skip
    method = "noaux_tc" if biased else "greedy" if config.n_groups == 1 else "group_limited_greedy"
    kind = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    if biased:
        kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {
        **kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.dense_hidden_dim,
        "moe_intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "first_k_dense_replace": config.n_dense_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.nope_head_dim,
        "qk_rope_head_dim": config.rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "n_routed_experts": config.n_experts,
        "n_shared_experts": config.n_shared_experts,
        "num_experts_per_tok": config.top_k,
        "n_group": config.n_groups,
        "topk_group": config.top_groups,
        "scoring_func": config.scores,
        "topk_method": method,
        "norm_topk_prob": config.normalize_weights,
        "routed_scaling_factor": config.routed_scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_interleave": True,
        "tie_word_embeddings": config.tie_embeddings,
        **_TOKENS,
    }


_LATENT_EPS: Final = 1e-6
"""What `transformers` adds to the mean square in the norms of DeepSeek's latents."""


def _decoder(config: LlamaConfig | MixtralConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        **_TOKENS,
    }


_TOKENS: Final = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""A plan does not state which tokens begin and end a text."""


def _rope_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    if config.rope_scaling == 1:
        return None
    found: dict[str, Any] = {"rope_type": config.rope_type, "factor": config.rope_scaling}
    if config.rope_type == "llama3":
        found["low_freq_factor"] = config.rope_low_freq_factor
        found["high_freq_factor"] = config.rope_high_freq_factor
    if config.rope_type == "yarn":
        found["beta_fast"], found["beta_slow"] = config.rope_beta_fast, config.rope_beta_slow
        if config.rope_attention_factor:
            found["attention_factor"] = config.rope_attention_factor
    if config.rope_type in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = config.rope_original_seq_len
    return found


def _gpt(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.dim,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.hidden_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": config.tie_embeddings,
        **_TOKENS,
    }


def _vit(config: ViTConfig) -> dict[str, Any]:
    return {"model_type": "vit", "hidden_size": config.dim, "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads, "intermediate_size": config.hidden_dim,
            "image_size": config.image_size, "patch_size": config.patch_size, "num_channels": config.n_channels,
            "layer_norm_eps": config.norm_eps}  # fmt: skip


class Difference(NamedTuple):
    """A field in which a published config differs from a model's.

    Attributes:
        field: its name there.
        published: its value there.
        own: the equivalent value of the model.
        changes_function: whether weights then have another meaning, rather than only other values.
    """

    field: str
    published: object
    own: object
    changes_function: bool


_DEFAULTS: Final[Mapping[str, object]] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
"""Values of fields that a published config of a built-in family omits; Llama's, but for `_DEFAULTS_OF_TYPE`."""

_DEFAULTS_OF_TYPE: Final[Mapping[str, Mapping[str, object]]] = {
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "gpt2": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts_per_tok": 8, "norm_topk_prob": False, "use_sliding_window": False},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "cwm": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192},
    "deepseek_v2": {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
}

_ALIKE: Final = (
    frozenset({"llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "cwm"}),
    frozenset({"mixtral", "qwen3_moe"}),
    frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"}),
)
"""Types of models that differ by compared fields or by tensors; others with the same tensors compute otherwise."""

_STRUCTURE: Final = ("num_attention_heads", "num_key_value_heads", "n_head", "hidden_act", "activation_function",
                     "num_experts_per_tok", "norm_topk_prob", "scoring_func", "n_group", "topk_group",
                     "routed_scaling_factor", "rope_interleave", "topk_method")  # fmt: skip
"""Fields without which weights mean something else, though shapes may agree."""

_OF_SCORES: Final = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")
"""Such fields that only a plan with a class of `transformers` can change, and then does so on purpose."""

_NUMBERS: Final = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_scaling", "sliding_window")
"""Fields that a training may want to change."""

_ACTIVATIONS: Final = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}
"""Other names of the same."""


def differences(own: Mapping[str, Any], published: Mapping[str, Any], *, builtin: bool) -> Iterator[Difference]:
    """Yield differences between a published config and a model that shapes of weights do not show.

    Args:
        own: the fields of the model's config.
        published: those of the published one; omitted ones have the value that is usual for built-in families, so that
            those of other types are to be complete.
        builtin: whether the model is a built-in one, all of whose numbers are among these; for a class of
            `transformers` every other number in both configs is compared.
    """
    published = part_of_type(own.get("model_type"), published)
    mine, theirs = _Given(own), _Given(published)
    if not _alike(own.get("model_type"), published.get("model_type")):
        yield Difference("model_type", published["model_type"], own["model_type"], True)
        return
    structure = (*_STRUCTURE, *_OF_SCORES) if builtin else _STRUCTURE
    compared = [field for field in (*structure, *_NUMBERS) if field in own or field in _OF_ANY]
    if not builtin:
        compared += sorted(name for name in own.keys() & published.keys() if _counts(name, own[name], published[name]))
    for field in dict.fromkeys(compared):
        if theirs.value(field) != mine.value(field):
            yield Difference(field, theirs.value(field), mine.value(field), field in structure)


def ties_embeddings(published: Mapping[str, Any]) -> bool | None:
    """Whether a published model has one tensor for its embedding and its output layer; None where it is not known."""
    found = published.get("tie_word_embeddings")
    if found is None and (published.get("model_type") == "gpt2" or _group(published.get("model_type"))):
        found = _Given(published).value("tie_word_embeddings")
    return None if found is None else bool(found)


def part_of_type(kind: object, published: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a published config for a model of a type, which may be one of several parts of the published one.

    Fields that the part omits are those of the whole. A config without such a part stays as it is, and so does any for
    a model of unknown type.
    """
    whole = published.get("model_type")
    if not isinstance(kind, str) or (isinstance(whole, str) and _alike(kind, whole)):
        return published
    for value in published.values():
        if isinstance(value, Mapping):
            part = part_of_type(kind, value)
            if isinstance(part.get("model_type"), str) and _alike(kind, part["model_type"]):
                return {**published, **part}
    return published


def _alike(kind: object, other: object) -> bool:
    """Whether a model of a type computes what one of another does; also where either is not known."""
    return not isinstance(kind, str) or not isinstance(other, str) or kind == other or other in _group(kind)


def _group(kind: object) -> frozenset[str]:
    return next((group for group in _ALIKE if kind in group), frozenset())


def _counts(name: str, *values: object) -> bool:
    """Whether a field of two configs is a number or a name that affects the computation."""
    plain = all(isinstance(value, bool | int | float | str) for value in values)
    return plain and not _BESIDE_THE_POINT.search(name)


_OF_ANY: Final = ("rope_theta", "rope_scaling", "sliding_window")
"""Fields that old and new configs have under different paths."""

_BESIDE_THE_POINT: Final = re.compile(
    r"dtype$|^transformers_version$|^use_cache$|_token_id$|initializer|drop|^max_position_embeddings$|^_|^output_|"
    r"gradient_checkpointing|pretraining_tp|_coef$|^use_sliding_window$|^model_type$|^return_dict$|^head_dim$"
)
"""Fields that do not affect the meaning of weights, or that shapes show."""


class _Given:
    """The fields of a published config, of an old release of `transformers` or of a new one."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._kind = str(fields.get("model_type"))
        rope = fields.get("rope_parameters")
        self._rope: Mapping[str, Any] = rope if isinstance(rope, dict) else {}

    def value(self, field: str) -> object:
        """Return the value of a field, or its default where it is omitted."""
        if field == "sliding_window":
            return self._window()
        if field == "rope_scaling":
            return _scaling(self._rope or self._fields.get(field))
        if field == "rope_theta" and "rope_theta" in self._rope:
            return self._rope["rope_theta"]
        if field in ("n_group", "topk_group") and self.value("topk_method") == "greedy":
            return 1
        found = self._fields.get(field)
        if found is None:
            found = self._default(field)
        if found is None and field == "num_key_value_heads":
            return self.value("num_attention_heads")
        if found == "group_limited_greedy" and self._fields.get("n_group") in (None, 1):
            return "greedy"
        return _ACTIVATIONS.get(found, found) if isinstance(found, str) else found

    def _default(self, field: str) -> object:
        return {**_DEFAULTS, **_DEFAULTS_OF_TYPE.get(self._kind, {})}.get(field)

    def _window(self) -> object:
        """The length of the window of attention; None where no layer has one."""
        layers, used = self._fields.get("layer_types"), self._fields.get("use_sliding_window")
        if used is None:
            used = self._default("use_sliding_window")
        if used is False or (isinstance(layers, list) and "sliding_attention" not in layers):
            return None
        return self._fields["sliding_window"] if "sliding_window" in self._fields else self._default("sliding_window")


def _scaling(given: object) -> dict[str, Any] | None:
    """Return the scaling of rotary wavelengths in one form; None for no scaling."""
    if not isinstance(given, Mapping):
        return None
    found = {("rope_type" if name == "type" else name): value for name, value in given.items()}
    kind = found.get("rope_type", "default")
    if kind == "default" or found.get("factor") == 1:
        return None
    found.setdefault("rope_type", kind)
    if kind == "yarn":
        found = {"beta_fast": 32.0, "beta_slow": 1.0, **found}
    neutral = [name for name, value in _NEUTRAL.items() if found.get(name) == value]
    for name in neutral:
        del found[name]
    return {name: value for name, value in sorted(found.items()) if name in _SCALING and value is not None}


_SCALING: Final = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                   "attention_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
                   "truncate", "partial_rotary_factor")  # fmt: skip
_NEUTRAL: Final = {"truncate": True, "partial_rotary_factor": 1.0}
"""Values that have no effect."""
