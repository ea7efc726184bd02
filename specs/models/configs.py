"""Dimensions of built-in models.

Importing this module is cheap and never imports torch: the linter checks a plan's `model` statement with
it, the lowered program builds its model with it. All lengths are counts (tokens, features, blocks), never
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from legoai.specs.models.config_checks import (
    ConfigError,
    check_types,
    doc,
    require_addressable,
    require_divides,
    require_positive,
    switch,
)

ROPE_TYPES: Final = ("llama3", "linear", "yarn")
"""Ways of stretching rotary wavelengths, by their names in the configs of `transformers`."""

SCORES: Final = ("softmax", "sigmoid")
"""Functions from a router's logits to scores of experts."""

_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    "rope_original_seq_len": ("llama3", "yarn"),
    "rope_beta_fast": ("yarn",),
    "rope_beta_slow": ("yarn",),
    "rope_attention_factor": ("yarn",),
}
"""Fields of a Llama that some ways of stretching read."""

_YARN_FIELDS: Final = ("rope_original_seq_len", "rope_beta_fast", "rope_beta_slow", "rope_mscale")
"""Fields of a DeepSeek that its stretching reads."""

STRETCHING_FIELDS: Final = (*_ROPE_FIELDS, *_YARN_FIELDS)
"""Fields without effect where `rope_scaling` is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Dimensions of a Llama 3 decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=doc("number of transformer blocks"))
    n_heads: int = field(metadata=doc("number of query heads; must divide `dim`"))
    n_kv_heads: int = field(metadata=doc("number of key/value heads; must divide `n_heads`"))
    hidden_dim: int = field(metadata=doc("width of the feed-forward's hidden layer, in features"))
    vocab_size: int = field(metadata=doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=doc("longest sequence the rotary table covers, in tokens"))
    norm_eps: float = field(default=1e-5, metadata=doc("added to the mean square inside RMSNorm"))
    rope_theta: float = field(default=500_000.0, metadata=doc("base of the rotary frequencies"))
    rope_scaling: float = field(
        default=1.0,
        metadata=doc("factor by which `rope_type` stretches wavelengths; 1 leaves them alone"),
    )
    rope_low_freq_factor: float = field(
        default=1.0,
        metadata=doc("wavelengths over `rope_original_seq_len` / this are stretched in full"),
    )
    rope_high_freq_factor: float = field(
        default=4.0,
        metadata=doc("wavelengths under `rope_original_seq_len` / this are left alone"),
    )
    rope_original_seq_len: int = field(default=8192, metadata=doc("sequence length before the stretching, in tokens"))
    rope_type: str = field(
        default="llama3",
        metadata=switch(
            '`"llama3"` stretches long wavelengths, `"linear"` all (Chen et al. 2023), `"yarn"` those that turn seldom '
            "(Peng et al. 2023)"
        ),
    )
    rope_beta_fast: float = field(
        default=32.0, metadata=switch("YaRN leaves wavelengths alone that turn more often in the original length")
    )
    rope_beta_slow: float = field(
        default=1.0, metadata=switch("YaRN stretches wavelengths in full that turn less often in the original length")
    )
    rope_attention_factor: float = field(
        default=0.0, metadata=switch("YaRN's factor of rotated heads; 0 is `0.1 ln(rope_scaling) + 1`")
    )
    head_dim: int = field(default=0, metadata=switch("features of one attention head; 0 is `dim / n_heads`"))
    qkv_bias: bool = field(default=False, metadata=switch("give queries, keys and values a bias, as Qwen2 does"))
    attention_bias: bool = field(default=False, metadata=switch("give all four layers of attention a bias"))
    mlp_bias: bool = field(default=False, metadata=switch("give the layers of the feed-forward a bias"))
    qk_norm: bool = field(
        default=False, metadata=switch("normalise each head's queries and keys before they are rotated, as Qwen3 does")
    )
    tie_embeddings: bool = field(default=False, metadata=doc("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        check_types(self)
        _check_decoder(self)
        self._check_rope()

    def _check_rope(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError("rope_type", f"rope_type must be one of {', '.join(ROPE_TYPES)}", ROPE_TYPES)
        if self.rope_scaling < 1:
            raise ConfigError("rope_scaling", f"rope_scaling must be at least 1, got {self.rope_scaling}")
        if self.rope_type != "llama3" and self.rope_scaling == 1:
            raise ConfigError("rope_scaling", f"rope_type = {self.rope_type} stretches by a rope_scaling above 1")
        for low, high in (("rope_low_freq_factor", "rope_high_freq_factor"), ("rope_beta_slow", "rope_beta_fast")):
            if not 0 < getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    low,
                    f"{low} = {getattr(self, low)} must be positive and less than {high} = {getattr(self, high)}",
                )
        if self.rope_attention_factor < 0:
            raise ConfigError("rope_attention_factor", "rope_attention_factor must be positive, or 0 for YaRN's own")
        if self.rope_type == "yarn" and self.rope_theta <= 1:
            raise ConfigError("rope_theta", f"rope_theta must be above 1 with rope_type = yarn, got {self.rope_theta}")
        require_positive(self, "rope_original_seq_len")
        stretching = self.rope_type if self.rope_scaling > 1 else ""
        for item in fields(self):
            kinds = _ROPE_FIELDS.get(item.name)
            if kinds is not None and stretching not in kinds and getattr(self, item.name) != item.default:
                given = f"rope_type = {self.rope_type}" if stretching else "rope_scaling = 1"
                raise ConfigError(item.name, f"{item.name} has no effect with {given}: it is for {' and '.join(kinds)}")

    @property
    def head_size(self) -> int:
        """Width of one attention head, in features."""
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """Dimensions of a Mixtral decoder: a Llama whose feed-forward is a sparse mixture of experts.

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=doc("number of transformer blocks"))
    n_heads: int = field(metadata=doc("number of query heads; must divide `dim`"))
    n_kv_heads: int = field(metadata=doc("number of key/value heads; must divide `n_heads`"))
    hidden_dim: int = field(metadata=doc("width of one expert's hidden layer, in features"))
    n_experts: int = field(metadata=doc("number of experts in each block"))
    top_k: int = field(metadata=doc("number of experts that each token visits; at most `n_experts`"))
    vocab_size: int = field(metadata=doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=doc("longest sequence the rotary table covers, in tokens"))
    norm_eps: float = field(default=1e-5, metadata=doc("added to the mean square inside RMSNorm"))
    rope_theta: float = field(default=1_000_000.0, metadata=doc("base of the rotary frequencies"))
    head_dim: int = field(default=0, metadata=switch("features of one attention head; 0 is `dim / n_heads`"))
    qkv_bias: bool = field(default=False, metadata=switch("give queries, keys and values a bias, as Qwen2's do"))
    attention_bias: bool = field(default=False, metadata=switch("give all four layers of attention a bias"))
    qk_norm: bool = field(
        default=False,
        metadata=switch("normalise each head's queries and keys before they are rotated, as Qwen3's do"),
    )
    tie_embeddings: bool = field(default=False, metadata=switch("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        check_types(self)
        _check_decoder(self)
        _check_experts(self)

    @property
    def head_size(self) -> int:
        """Width of one attention head, in features."""
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekConfig:
    """Dimensions of a DeepSeek-V2 or -V3 decoder: latent attention, dense blocks, then mixtures with shared experts.

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=doc("number of transformer blocks"))
    n_dense_layers: int = field(metadata=doc("number of leading blocks whose feed-forward has no experts"))
    n_heads: int = field(metadata=doc("number of attention heads"))
    q_lora_rank: int = field(metadata=doc("width of the latent of queries; 0 computes queries without one"))
    kv_lora_rank: int = field(metadata=doc("width of the latent of keys and values"))
    nope_head_dim: int = field(metadata=doc("features of a head's queries and keys without positions"))
    rope_head_dim: int = field(metadata=doc("rotated features of a head's queries and, shared by all heads, of keys"))
    v_head_dim: int = field(metadata=doc("features of a head's values"))
    dense_hidden_dim: int = field(metadata=doc("width of a dense block's hidden layer, in features"))
    hidden_dim: int = field(metadata=doc("width of one expert's hidden layer, in features"))
    n_experts: int = field(metadata=doc("number of routed experts in each block"))
    n_shared_experts: int = field(metadata=doc("number of experts that every token visits, computed as one"))
    top_k: int = field(metadata=doc("number of routed experts that each token visits; at most `n_experts`"))
    vocab_size: int = field(metadata=doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=doc("longest sequence the rotary table covers, in tokens"))
    n_groups: int = field(default=1, metadata=doc("number of groups of experts; must divide `n_experts`"))
    top_groups: int = field(default=1, metadata=doc("number of groups in which the experts of a token lie"))
    scores: str = field(
        default="sigmoid",
        metadata=doc(
            '`"softmax"` of the router\'s logits, as V2 does, or `"sigmoid"`, with a bias for the choice, as V3 does'
        ),
    )
    normalize_weights: bool = field(default=True, metadata=doc("scale the weights of a token's experts to sum to one"))
    routed_scaling: float = field(default=1.0, metadata=doc("factor of the weights of a token's experts"))
    norm_eps: float = field(default=1e-6, metadata=doc("added to the mean square inside RMSNorm"))
    rope_theta: float = field(default=10_000.0, metadata=doc("base of the rotary frequencies"))
    rope_scaling: float = field(
        default=1.0, metadata=doc("factor by which YaRN stretches wavelengths that turn seldom; 1 leaves them alone")
    )
    rope_original_seq_len: int = field(default=4096, metadata=doc("sequence length before the stretching, in tokens"))
    rope_beta_fast: float = field(
        default=32.0, metadata=switch("YaRN leaves wavelengths alone that turn more often in the original length")
    )
    rope_beta_slow: float = field(
        default=1.0, metadata=switch("YaRN stretches wavelengths in full that turn less often in the original length")
    )
    rope_mscale: float = field(
        default=1.0,
        metadata=doc("scores of stretched attention are scaled by `(0.1 rope_mscale ln(rope_scaling) + 1) ** 2`"),
    )
    tie_embeddings: bool = field(default=False, metadata=switch("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "dim", "n_layers", "n_heads", "kv_lora_rank", "nope_head_dim", "rope_head_dim")
        require_positive(self, "v_head_dim", "dense_hidden_dim", "hidden_dim", "n_shared_experts", "routed_scaling")
        require_positive(self, "vocab_size", "max_seq_len", "norm_eps", "rope_theta", "rope_original_seq_len")
        _check_experts(self)
        self._check_choice()
        if not 0 <= self.n_dense_layers < self.n_layers:
            raise ConfigError(
                "n_dense_layers",
                f"n_dense_layers = {self.n_dense_layers} must be less than n_layers = {self.n_layers}, so that a block "
                "has experts",
            )
        if self.q_lora_rank < 0:
            raise ConfigError("q_lora_rank", f"q_lora_rank must be positive, or 0 for none, got {self.q_lora_rank}")
        if self.rope_head_dim % 2:
            raise ConfigError(
                "rope_head_dim", f"rope_head_dim = {self.rope_head_dim} is odd: rotary positions rotate pairs"
            )
        self._check_rope()
        require_addressable(self, ("vocab_size", "dim"), ("dense_hidden_dim", "dim"), ("max_seq_len", "rope_head_dim"))
        require_addressable(self, ("n_heads", "head_size", "dim"), ("n_heads", "v_head_dim", "dim"), ("dim", "dim"))
        require_addressable(self, ("n_heads", "head_size", "q_lora_rank"), ("dim", "q_lora_rank"))
        require_addressable(self, ("n_heads", "key_value_size", "kv_lora_rank"), ("kv_lora_rank", "dim"))
        require_addressable(self, ("n_shared_experts", "hidden_dim", "dim"))

    def _check_choice(self) -> None:
        require_positive(self, "n_groups", "top_groups")
        require_divides(self, "n_groups", "n_experts", because="every group has as many experts")
        if self.scores not in SCORES:
            raise ConfigError("scores", f"scores must be one of {', '.join(SCORES)}", SCORES)
        if self.top_groups > self.n_groups:
            raise ConfigError("top_groups", f"top_groups = {self.top_groups} is more than n_groups = {self.n_groups}")
        each = self.n_experts // self.n_groups
        if self.top_k > self.top_groups * each:
            raise ConfigError(
                "top_k",
                f"top_k = {self.top_k} is more than the {self.top_groups * each} experts of top_groups = "
                f"{self.top_groups} of n_groups = {self.n_groups}",
            )
        if self.scores == "sigmoid" and self.n_groups > 1 and each == 1:
            raise ConfigError(
                "n_groups", f"n_groups = {self.n_groups} leaves one expert in a group, which is chosen by its best two"
            )

    def _check_rope(self) -> None:
        if self.rope_scaling < 1:
            raise ConfigError("rope_scaling", f"rope_scaling must be at least 1, got {self.rope_scaling}")
        if not 0 < self.rope_beta_slow < self.rope_beta_fast:
            raise ConfigError(
                "rope_beta_slow",
                f"rope_beta_slow = {self.rope_beta_slow} must be positive and less than rope_beta_fast = "
                f"{self.rope_beta_fast}",
            )
        if self.rope_mscale < 0:
            raise ConfigError("rope_mscale", f"rope_mscale must not be negative, got {self.rope_mscale}")
        if self.rope_scaling > 1 and self.rope_theta <= 1:
            raise ConfigError("rope_theta", f"rope_theta must be above 1 with rope_scaling, got {self.rope_theta}")
        for item in fields(self):
            if self.rope_scaling == 1 and item.name in _YARN_FIELDS and getattr(self, item.name) != item.default:
                raise ConfigError(item.name, f"{item.name} has no effect with rope_scaling = 1: it is for a larger one")

    @property
    def head_size(self) -> int:
        """Width of one head's queries and keys, in features."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def key_value_size(self) -> int:
        """Features of one head that are computed from the latent of keys and values."""
        return self.nope_head_dim + self.v_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Dimensions of a GPT-2 or GPT-3 decoder: LayerNorm before each sublayer, learned positions, GELU.

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=doc("number of transformer blocks"))
    n_heads: int = field(metadata=doc("number of attention heads; must divide `dim`"))
    hidden_dim: int = field(metadata=doc("width of the feed-forward's hidden layer, in features"))
    vocab_size: int = field(metadata=doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=doc("number of learned positions, in tokens"))
    norm_eps: float = field(default=1e-5, metadata=doc("added to the variance inside LayerNorm"))
    bias: bool = field(default=True, metadata=doc("give linear layers and norms a bias"))
    tie_embeddings: bool = field(default=True, metadata=doc("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "dim", "n_layers", "n_heads", "hidden_dim", "vocab_size", "max_seq_len", "norm_eps")
        require_divides(self, "n_heads", "dim", because="every head is equally wide")
        require_addressable(self, ("dim", "dim"), ("vocab_size", "dim"), ("max_seq_len", "dim"), ("hidden_dim", "dim"))

    @property
    def head_size(self) -> int:
        """Width of one attention head, in features."""
        return self.dim // self.n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """Dimensions of a vision transformer for image classification (square images, class token).

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=doc("number of transformer blocks"))
    n_heads: int = field(metadata=doc("number of attention heads; must divide `dim`"))
    hidden_dim: int = field(metadata=doc("width of the feed-forward's hidden layer, in features"))
    patch_size: int = field(metadata=doc("side of one patch, in pixels; must divide `image_size`"))
    image_size: int = field(default=224, metadata=doc("side of the image, in pixels"))
    n_channels: int = field(default=3, metadata=doc("number of colour channels"))
    n_classes: int = field(default=1000, metadata=doc("number of classes"))
    norm_eps: float = field(default=1e-6, metadata=doc("added to the variance inside LayerNorm"))

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(
            self,
            "dim",
            "n_layers",
            "n_heads",
            "hidden_dim",
            "patch_size",
            "image_size",
            "n_channels",
            "n_classes",
        )
        require_positive(self, "norm_eps")
        require_divides(self, "n_heads", "dim", because="every head is equally wide")
        require_divides(self, "patch_size", "image_size", because="patches tile the image")
        require_addressable(self, ("n_channels", "image_size", "image_size"))
        require_addressable(self, ("dim", "dim"), ("hidden_dim", "dim"), ("n_classes", "dim"), ("n_tokens", "dim"))
        require_addressable(self, ("dim", "n_channels", "patch_size", "patch_size"))

    @property
    def head_size(self) -> int:
        """Width of one attention head, in features."""
        return self.dim // self.n_heads

    @property
    def n_tokens(self) -> int:
        """Length of the sequence that the blocks see: all patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


def _check_experts(config: MixtralConfig | DeepSeekConfig) -> None:
    require_positive(config, "n_experts", "top_k")
    for name in ("dim", "hidden_dim"):
        if getattr(config, name) % 8:
            raise ConfigError(
                name,
                f"{name} = {getattr(config, name)} must be a multiple of 8: the grouped kernel of the experts takes "
                f"matrices whose rows are whole multiples of 16 bytes",
            )
    require_addressable(config, ("n_experts", "hidden_dim", "dim"), ("n_experts", "dim"))
    if config.top_k > config.n_experts:
        raise ConfigError(
            "top_k",
            f"top_k = {config.top_k} is more than n_experts = {config.n_experts}: a token visits distinct experts",
        )


def _check_decoder(config: LlamaConfig | MixtralConfig) -> None:
    require_positive(config, "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len")
    require_positive(config, "norm_eps", "rope_theta")
    if config.head_dim < 0:
        raise ConfigError("head_dim", f"head_dim must be positive, or 0 for dim / n_heads, got {config.head_dim}")
    if config.qkv_bias and config.attention_bias:
        raise ConfigError(
            "qkv_bias", "qkv_bias has no effect: attention_bias gives these layers a bias, and the fourth"
        )
    named = config.head_dim > 0
    if not named:
        require_divides(config, "n_heads", "dim", because="every head is equally wide")
    require_divides(config, "n_kv_heads", "n_heads", because="query heads share key/value heads evenly")
    if config.head_size % 2:
        width = f"{'' if named else 'dim / n_heads = '}{config.head_size}"
        raise ConfigError(
            "head_dim" if named else "n_heads", f"a head of {width} features is odd: rotary positions rotate pairs"
        )
    require_addressable(
        config,
        ("dim", "dim"),
        ("vocab_size", "dim"),
        ("hidden_dim", "dim"),
        ("max_seq_len", "head_size"),
        ("n_heads", "head_size", "dim"),
    )


ModelConfig = LlamaConfig | MixtralConfig | DeepSeekConfig | GPTConfig | ViTConfig
"""Any built-in config."""
