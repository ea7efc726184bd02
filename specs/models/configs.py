"""The dimensions of each built-in model family, and their published presets.

Importing this module is cheap and never imports torch: the linter checks a plan's `model` statement with
it, the lowered program builds its model with it. All lengths are counts (tokens, features, blocks), never
bytes.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Final, NamedTuple

Scalar = bool | int | float | str
"""A value that a plan can give to one field of a config."""


class ConfigError(ValueError):
    """A model's preset or field has no meaning.

    Attributes:
        argument: the offending name: `family`, `preset`, or the name of a config field.
        message: what is wrong, in words for the author of a plan.
        legal: the values that would have been accepted where they can be listed, else empty.
    """

    def __init__(self, argument: str, message: str, legal: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.argument = argument
        self.message = message
        self.legal = legal


MOST_LAYERS: Final = 1000
"""Of a built-in model, as in the deepest Transformer that was published (DeepNet, Wang et al. 2022). Building and
following one of so many layers takes some ten seconds; more would keep a person waiting for what is a slip."""


def _doc(text: str) -> dict[str, str]:
    return {"doc": text}


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise ConfigError(name, f"{name} must be positive, got {value}")
        if name == "n_layers" and value > MOST_LAYERS:
            raise ConfigError(name, f"n_layers = {value} is more than {MOST_LAYERS}, the most that is looked at")


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


_FIELD_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool}
_TYPE_WORDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false"}


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
        metadata=_doc("factor by which Llama 3.1 stretches the long wavelengths; 1 leaves them alone"),
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
    tie_embeddings: bool = field(default=False, metadata=_doc("use one weight for `tok_embeddings` and `output`"))

    def __post_init__(self) -> None:
        _check_types(self)
        _check_decoder(self)
        if self.rope_scaling < 1:
            raise ConfigError("rope_scaling", f"rope_scaling must be at least 1, got {self.rope_scaling}")
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise ConfigError(
                "rope_low_freq_factor",
                f"rope_low_freq_factor = {self.rope_low_freq_factor} must be positive and less than "
                f"rope_high_freq_factor = {self.rope_high_freq_factor}",
            )
        _require_positive(self, "rope_original_seq_len")

    @property
    def head_dim(self) -> int:
        """Width of one attention head, in features."""
        return self.dim // self.n_heads


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

    def __post_init__(self) -> None:
        _check_types(self)
        _check_decoder(self)
        _require_positive(self, "n_experts", "top_k")
        if self.top_k > self.n_experts:
            raise ConfigError(
                "top_k",
                f"top_k = {self.top_k} is more than n_experts = {self.n_experts}: a token visits distinct experts",
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head, in features."""
        return self.dim // self.n_heads


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

    @property
    def head_dim(self) -> int:
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

    @property
    def head_dim(self) -> int:
        """Width of one attention head, in features."""
        return self.dim // self.n_heads

    @property
    def n_tokens(self) -> int:
        """Length of the sequence that the blocks see: all patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


def _check_decoder(config: LlamaConfig | MixtralConfig) -> None:
    _require_positive(config, "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len")
    _require_positive(config, "norm_eps", "rope_theta")
    _require_divides(config, "n_heads", "dim", because="every head is equally wide")
    _require_divides(config, "n_kv_heads", "n_heads", because="query heads share key/value heads evenly")
    if config.head_dim % 2:
        raise ConfigError(
            "n_heads",
            f"a head of dim / n_heads = {config.head_dim} features is odd: rotary positions rotate pairs",
        )


_Config = LlamaConfig | MixtralConfig | GPTConfig | ViTConfig
ModelConfig = _Config
"""Any built-in config."""


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

GPT2_PRESETS: Mapping[str, GPTConfig] = types.MappingProxyType(
    {
        "small": _GPT2_SMALL,
        "124m": _GPT2_SMALL,
        "medium": _gpt(1024, 24, 16, 1024),
        "large": _gpt(1280, 36, 20, 1024),
        "xl": _gpt(1600, 48, 25, 1024),
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
    else:
        raise ConfigError("preset", f"{family} has no preset named {preset!r}", tuple(chosen.presets))
    values.update(overrides)
    return chosen.config_class(**values)  # type: ignore[arg-type]  # checked field by field in __post_init__
