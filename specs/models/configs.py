"""Dimensions of built-in models.

Importing this module is cheap and never imports torch: the linter checks a plan's `model` statement with
it, the lowered program builds its model with it. All lengths are counts (tokens, features, blocks), never
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

Scalar = bool | int | float | str
"""Values that a plan can give to a field of a config."""


class ConfigError(ValueError):
    """A model's preset or field is invalid.

    Attributes:
        argument: the offending name: `family`, `preset`, or the name of a config field.
        message: the problem, for the author of a plan.
        legal: the accepted values where they can be listed, else empty.
    """

    def __init__(self, argument: str, message: str, legal: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.argument = argument
        self.message = message
        self.legal = legal


MOST_LAYERS: Final = 1000
"""Most layers of a built-in model, as in the deepest published Transformer (DeepNet, Wang et al. 2022). Building and
tracing a model with so many layers takes some ten seconds; more is likely a mistake."""


MOST_ELEMENTS: Final = 2**40
"""Most elements of one parameter or table: 4 TiB in fp32, some hundred times the largest of any published model. More
would overflow torch's count of bytes, or is a mistake."""


def _doc(text: str) -> dict[str, str]:
    return {"doc": text}


def _switch(text: str) -> dict[str, str]:
    """Metadata of a field that programs leave out where it has its default."""
    return {"doc": text, "left_out": "at its default"}


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise ConfigError(name, f"{name} must be positive, got {value}")
        if name == "n_layers" and value > MOST_LAYERS:
            raise ConfigError(name, f"n_layers = {value} is more than {MOST_LAYERS}, the most that is looked at")


def _require_addressable(config: _Config, *products: tuple[str, ...]) -> None:
    """Check the sizes of the largest tensors, each the product of some fields."""
    for names in products:
        values = {name: int(getattr(config, name)) for name in names}
        if math.prod(values[name] for name in names) > MOST_ELEMENTS:
            largest = max((item.name for item in fields(config) if item.name in values), key=values.__getitem__)
            product = " x ".join(f"{name} = {values[name]}" for name in names)
            raise ConfigError(
                largest, f"{product} makes a tensor of more than 2**40 elements, the most that is looked at"
            )


def _require_divides(config: object, divisor: str, dividend: str, *, because: str) -> None:
    small, large = getattr(config, divisor), getattr(config, dividend)
    if large % small:
        legal = tuple(str(n) for n in range(1, large + 1) if large % n == 0) if large <= 1 << 16 else ()
        raise ConfigError(divisor, f"{divisor} = {small} must divide {dividend} = {large}: {because}", legal)


def _check_types(config: _Config) -> None:
    for item in fields(config):
        expected = _FIELD_TYPES[str(item.type)]
        value = getattr(config, item.name)
        if expected is float and type(value) is int:
            object.__setattr__(config, item.name, float(value))
        elif type(value) is not expected:
            got = type(value).__name__
            raise ConfigError(item.name, f"{item.name} must be {_TYPE_WORDS[expected]}, got {got} {value!r}")
        if expected is float and not math.isfinite(value):
            raise ConfigError(item.name, f"{item.name} must be a finite number, got {value}")


_FIELD_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_TYPE_WORDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a quoted name"}

ROPE_TYPES: Final = ("llama3", "linear", "yarn")
"""Ways of stretching rotary wavelengths, by their names in the configs of `transformers`."""

_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    "rope_original_seq_len": ("llama3", "yarn"),
    "rope_beta_fast": ("yarn",),
    "rope_beta_slow": ("yarn",),
    "rope_attention_factor": ("yarn",),
}
"""Fields that some ways of stretching read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Dimensions of a Llama 3 decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=_doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=_doc("number of transformer blocks"))
    n_heads: int = field(metadata=_doc("number of query heads; must divide `dim`"))
    n_kv_heads: int = field(metadata=_doc("number of key/value heads; must divide `n_heads`"))
    hidden_dim: int = field(metadata=_doc("width of the feed-forward's hidden layer, in features"))
    vocab_size: int = field(metadata=_doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=_doc("longest sequence the rotary table covers, in tokens"))
    norm_eps: float = field(default=1e-5, metadata=_doc("added to the mean square inside RMSNorm"))
    rope_theta: float = field(default=500_000.0, metadata=_doc("base of the rotary frequencies"))
    rope_scaling: float = field(
        default=1.0,
        metadata=_doc("factor by which `rope_type` stretches wavelengths; 1 leaves them alone"),
    )
    rope_low_freq_factor: float = field(
        default=1.0,
        metadata=_doc("wavelengths over `rope_original_seq_len` / this are stretched in full"),
    )
    rope_high_freq_factor: float = field(
        default=4.0,
        metadata=_doc("wavelengths under `rope_original_seq_len` / this are left alone"),
    )
    rope_original_seq_len: int = field(default=8192, metadata=_doc("sequence length before the stretching, in tokens"))
    rope_type: str = field(
        default="llama3",
        metadata=_switch(
            '`"llama3"` stretches long wavelengths, `"linear"` all (Chen et al. 2023), `"yarn"` those that turn seldom '
            "(Peng et al. 2023)"
        ),
    )
    rope_beta_fast: float = field(
        default=32.0, metadata=_switch("YaRN leaves wavelengths alone that turn more often in the original length")
    )
    rope_beta_slow: float = field(
        default=1.0, metadata=_switch("YaRN stretches wavelengths in full that turn less often in the original length")
    )
    rope_attention_factor: float = field(
        default=0.0, metadata=_switch("YaRN's factor of rotated heads; 0 is `0.1 ln(rope_scaling) + 1`")
    )
    head_dim: int = field(default=0, metadata=_switch("features of one attention head; 0 is `dim / n_heads`"))
    qkv_bias: bool = field(default=False, metadata=_switch("give queries, keys and values a bias, as Qwen2 does"))
    attention_bias: bool = field(default=False, metadata=_switch("give all four layers of attention a bias"))
    mlp_bias: bool = field(default=False, metadata=_switch("give the layers of the feed-forward a bias"))
    qk_norm: bool = field(
        default=False, metadata=_switch("normalise each head's queries and keys before they are rotated, as Qwen3 does")
    )
    tie_embeddings: bool = field(default=False, metadata=_doc("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        _check_types(self)
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
        _require_positive(self, "rope_original_seq_len")
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

    dim: int = field(metadata=_doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=_doc("number of transformer blocks"))
    n_heads: int = field(metadata=_doc("number of query heads; must divide `dim`"))
    n_kv_heads: int = field(metadata=_doc("number of key/value heads; must divide `n_heads`"))
    hidden_dim: int = field(metadata=_doc("width of one expert's hidden layer, in features"))
    n_experts: int = field(metadata=_doc("number of experts in each block"))
    top_k: int = field(metadata=_doc("number of experts that each token visits; at most `n_experts`"))
    vocab_size: int = field(metadata=_doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=_doc("longest sequence the rotary table covers, in tokens"))
    norm_eps: float = field(default=1e-5, metadata=_doc("added to the mean square inside RMSNorm"))
    rope_theta: float = field(default=1_000_000.0, metadata=_doc("base of the rotary frequencies"))
    head_dim: int = field(default=0, metadata=_switch("features of one attention head; 0 is `dim / n_heads`"))
    qkv_bias: bool = field(default=False, metadata=_switch("give queries, keys and values a bias, as Qwen2's do"))
    attention_bias: bool = field(default=False, metadata=_switch("give all four layers of attention a bias"))
    qk_norm: bool = field(
        default=False,
        metadata=_switch("normalise each head's queries and keys before they are rotated, as Qwen3's do"),
    )
    tie_embeddings: bool = field(default=False, metadata=_switch("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        _check_types(self)
        _check_decoder(self)
        _require_positive(self, "n_experts", "top_k")
        for name in ("dim", "hidden_dim"):
            if getattr(self, name) % 8:
                raise ConfigError(
                    name,
                    f"{name} = {getattr(self, name)} must be a multiple of 8: the grouped kernel of the experts takes "
                    f"matrices whose rows are whole multiples of 16 bytes",
                )
        _require_addressable(self, ("n_experts", "hidden_dim", "dim"), ("n_experts", "dim"))
        if self.top_k > self.n_experts:
            raise ConfigError(
                "top_k",
                f"top_k = {self.top_k} is more than n_experts = {self.n_experts}: a token visits distinct experts",
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head, in features."""
        return self.head_dim or self.dim // self.n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Dimensions of a GPT-2 or GPT-3 decoder: LayerNorm before each sublayer, learned positions, GELU.

    Raises:
        ConfigError: a field has the wrong type or dimensions disagree.
    """

    dim: int = field(metadata=_doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=_doc("number of transformer blocks"))
    n_heads: int = field(metadata=_doc("number of attention heads; must divide `dim`"))
    hidden_dim: int = field(metadata=_doc("width of the feed-forward's hidden layer, in features"))
    vocab_size: int = field(metadata=_doc("number of tokens in the vocabulary"))
    max_seq_len: int = field(metadata=_doc("number of learned positions, in tokens"))
    norm_eps: float = field(default=1e-5, metadata=_doc("added to the variance inside LayerNorm"))
    bias: bool = field(default=True, metadata=_doc("give linear layers and norms a bias"))
    tie_embeddings: bool = field(default=True, metadata=_doc("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        _check_types(self)
        _require_positive(self, "dim", "n_layers", "n_heads", "hidden_dim", "vocab_size", "max_seq_len", "norm_eps")
        _require_divides(self, "n_heads", "dim", because="every head is equally wide")
        _require_addressable(self, ("dim", "dim"), ("vocab_size", "dim"), ("max_seq_len", "dim"), ("hidden_dim", "dim"))

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

    dim: int = field(metadata=_doc("width of the residual stream, in features"))
    n_layers: int = field(metadata=_doc("number of transformer blocks"))
    n_heads: int = field(metadata=_doc("number of attention heads; must divide `dim`"))
    hidden_dim: int = field(metadata=_doc("width of the feed-forward's hidden layer, in features"))
    patch_size: int = field(metadata=_doc("side of one patch, in pixels; must divide `image_size`"))
    image_size: int = field(default=224, metadata=_doc("side of the image, in pixels"))
    n_channels: int = field(default=3, metadata=_doc("number of colour channels"))
    n_classes: int = field(default=1000, metadata=_doc("number of classes"))
    norm_eps: float = field(default=1e-6, metadata=_doc("added to the variance inside LayerNorm"))

    def __post_init__(self) -> None:
        _check_types(self)
        _require_positive(
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
        _require_positive(self, "norm_eps")
        _require_divides(self, "n_heads", "dim", because="every head is equally wide")
        _require_divides(self, "patch_size", "image_size", because="patches tile the image")
        _require_addressable(self, ("n_channels", "image_size", "image_size"))
        _require_addressable(self, ("dim", "dim"), ("hidden_dim", "dim"), ("n_classes", "dim"), ("n_tokens", "dim"))
        _require_addressable(self, ("dim", "n_channels", "patch_size", "patch_size"))

    @property
    def head_size(self) -> int:
        """Width of one attention head, in features."""
        return self.dim // self.n_heads

    @property
    def n_tokens(self) -> int:
        """Length of the sequence that the blocks see: all patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


def _check_decoder(config: LlamaConfig | MixtralConfig) -> None:
    _require_positive(config, "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len")
    _require_positive(config, "norm_eps", "rope_theta")
    if config.head_dim < 0:
        raise ConfigError("head_dim", f"head_dim must be positive, or 0 for dim / n_heads, got {config.head_dim}")
    if config.qkv_bias and config.attention_bias:
        raise ConfigError(
            "qkv_bias", "qkv_bias has no effect: attention_bias gives these layers a bias, and the fourth"
        )
    named = config.head_dim > 0
    if not named:
        _require_divides(config, "n_heads", "dim", because="every head is equally wide")
    _require_divides(config, "n_kv_heads", "n_heads", because="query heads share key/value heads evenly")
    if config.head_size % 2:
        width = f"{'' if named else 'dim / n_heads = '}{config.head_size}"
        raise ConfigError(
            "head_dim" if named else "n_heads", f"a head of {width} features is odd: rotary positions rotate pairs"
        )
    _require_addressable(
        config,
        ("dim", "dim"),
        ("vocab_size", "dim"),
        ("hidden_dim", "dim"),
        ("max_seq_len", "head_size"),
        ("n_heads", "head_size", "dim"),
    )


_Config = LlamaConfig | MixtralConfig | GPTConfig | ViTConfig
ModelConfig = _Config
"""Any built-in config."""
