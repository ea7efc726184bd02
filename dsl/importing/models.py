"""Models of TorchTitan that are built-ins: the `model` statement of each flavour."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from legoai.dsl.diagnostics.codes.importing import UnknownConfigModel
from legoai.dsl.importing.config import Config

_LINEAR: Final = {
    "layers.*.attention": ("wq", "wk", "wv", "wo"),
    "layers.*.feed_forward": ("w1", "w2", "w3"),
}
"""Linear layers of a block of Llama, by the module that holds them."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """A model in one size.

    Attributes:
        text: arguments of the family: the preset, and dimensions that differ from it.
        layers: its number of blocks.
        tied: whether embedding and output layer share their weight.
        family: the built-in model.
        linear: names of its linear layers in blocks, by the module that holds them.
        stretching: arguments that say how wavelengths of latent attention are stretched; None of another attention.
        routing: how TorchTitan chooses experts otherwise; empty where it chooses as the built-in model does.
    """

    text: str
    layers: int
    tied: bool = False
    family: str = "llama3"
    linear: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _LINEAR)
    stretching: str | None = None
    routing: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether blocks have mixtures of experts."""
        return self.family != "llama3"

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values are computed from a latent, by heads that are wider than the values."""
        return self.stretching is not None


def _llama(preset: str, layers: int, *, old: bool) -> Flavour:
    """A published size; wavelengths are stretched since TorchTitan's 2025."""
    return Flavour(f'"{preset}"{", rope_scaling = 1.0" if old else ""}', layers)


def _debug(layers: int, vocabulary: int, *, old: bool) -> Flavour:
    """TorchTitan's smallest Llama, whose vocabulary is that of the tokenizer beside its tests."""
    dims = f"dim = 256, n_layers = {layers}, n_heads = 16, n_kv_heads = 16, hidden_dim = 768, vocab_size = {vocabulary}"
    return Flavour(f'"tiny", {dims}{"" if old else ", rope_scaling = 8.0"}', layers)


def _qwen3(dim: int, layers: int, heads: int, hidden: int, *, vocabulary: int = 151_936, tied: bool = False) -> Flavour:
    dims = f"dim = {dim}, n_layers = {layers}, n_heads = {heads}, n_kv_heads = 8, head_dim = 128, hidden_dim = {hidden}"
    rest = f"vocab_size = {vocabulary}, norm_eps = 1e-6, rope_theta = 1000000.0, rope_scaling = 1.0, qk_norm = true"
    return Flavour(f'"8b", {dims}, {rest}{", tie_embeddings = true" if tied else ""}', layers, tied)


def _qwen3_moe(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    experts: int,
    *,
    kv_heads: int = 4,
    vocabulary: int = 151_936,
    theta: float = 1e6,
) -> Flavour:
    """Qwen3 with experts; TorchTitan divides the probabilities of those that are chosen by their sum, as Mixtral."""
    dims = f"dim = {dim}, n_layers = {layers}, n_heads = {heads}, n_kv_heads = {kv_heads}, head_dim = 128"
    choice = f"hidden_dim = {hidden}, n_experts = {experts}, top_k = 8, vocab_size = {vocabulary}"
    rest = f"norm_eps = 1e-6, rope_theta = {theta}, qk_norm = true"
    return Flavour(
        f"{dims}, {choice}, {rest}", layers, family="mixtral", linear={**_LINEAR, "layers.*.feed_forward": ("router",)}
    )


def _deepseek(preset: str, layers: int, mscale: float | None, dims: str = "", *, routing: str = "") -> Flavour:
    """DeepSeek; TorchTitan's norms add more, and all but its 671B scale stretched attention by other factors."""
    text = f'"{preset}"{f", {dims}" if dims else ""}, norm_eps = 1e-5'
    queries = ("wq",) if preset == "v2_lite" else ("wq_a", "wq_b")
    linear = {
        "layers.*.attention": (*queries, "wkv_a", "wkv_b", "wo"),
        "layers.*.feed_forward": ("w1", "w2", "w3", "router"),
        "layers.*.feed_forward.shared": ("w1", "w2", "w3"),
    }
    stretching = "" if mscale is None else f"rope_mscale = {mscale}"
    return Flavour(text, layers, family="deepseek", linear=linear, stretching=stretching, routing=routing)


_GROUPS: Final = (
    "TorchTitan chooses groups of experts by their two best together; here, with softmax scores, by their best one"
)


def _llamas(*, old: bool) -> dict[str, Flavour]:
    sizes = {"8B": ("8b", 32), "70B": ("70b", 80), "405B": ("405b", 126)}
    found = {flavour: _llama(*size, old=old) for flavour, size in sizes.items()}
    return {**found, "debugmodel": _debug(8, 2256, old=True) if old else _debug(6, 2048, old=False)}


_NOW: Final = {
    "llama3": _llamas(old=False),
    "qwen3": {
        "debugmodel": _qwen3(256, 8, 16, 3072, vocabulary=2048, tied=True),
        "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
        "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
        "4B": _qwen3(2560, 36, 32, 9728, tied=True),
        "8B": _qwen3(4096, 36, 32, 12_288),
        "14B": _qwen3(5120, 40, 40, 17_408),
        "32B": _qwen3(5120, 64, 64, 25_600),
        "debugmodel_moe": _qwen3_moe(256, 8, 16, 768, 64, kv_heads=8, vocabulary=2048),
        "30B-A3B": _qwen3_moe(2048, 48, 32, 768, 128),
        "235B-A22B": _qwen3_moe(4096, 94, 64, 1536, 128, theta=5e6),
    },
    "deepseek_v3": {
        "debugmodel": _deepseek(
            "v2_lite",
            6,
            0.7,
            "dim = 256, n_layers = 6, dense_hidden_dim = 1024, hidden_dim = 256, n_experts = 8, top_k = 3, "
            "vocab_size = 2048",
        ),
        "16B": _deepseek("v2_lite", 27, 0.7),
        "236B": _deepseek("v2", 60, 1.0, routing=_GROUPS),
        "671B": _deepseek("v3", 61, None),
    },
}
_PYTHON: Final = {
    **_NOW,
    "llama3": {
        **_llamas(old=False),
        # Wavelengths of all sizes are stretched by 8, those of the published small ones by 32.
        "1B": Flavour('"1b", rope_scaling = 8.0', 16, tied=True),
        "3B": Flavour('"3b", rope_scaling = 8.0', 28, tied=True),
    },
}
_SAME: Final = re.compile(r"_(flex|varlen)(_attn)?$|_(non_)?fused_qkv$")
"""Ends of flavours that choose kernels, not dimensions."""
_ORIGINAL: Final = 4096
"""Tokens of a sequence before the stretching of DeepSeek's wavelengths."""
_THEN: Final = {"llama3": _llamas(old=True), "llama": _llamas(old=True)}
"""Until March 2025; the tokenizer of the tests had 2,256 tokens."""


def flavour_of(config: Config) -> Flavour | None:
    """Return the model that the config names; None, after a diagnostic, where it is not built in."""
    name, flavour = config["model.name"], config["model.flavor"]
    models = _THEN if config.is_old else _PYTHON if config.format.is_python else _NOW
    if config.format.is_python or name == "deepseek_v3":
        flavour = _SAME.sub("", flavour)
    if name not in models:
        message = f"`{name}` of TorchTitan is no built-in of LegoAI"
        help = [f"known are {', '.join(f'`{item}`' for item in models)}"]
        place = config.span_of("model.name")
        config.diagnostics.append(UnknownConfigModel.at(place, message, label="another model", help=help))
        return None
    if flavour not in models[name]:
        message = f"the flavour `{flavour}` of `{name}` is no built-in of LegoAI"
        help = [f"known are {', '.join(f'`{item}`' for item in models[name])}"]
        place = config.span_of("model.flavor")
        config.diagnostics.append(UnknownConfigModel.at(place, message, label="another flavour", help=help))
        return None
    return models[name][flavour]


def model_statement(config: Config, flavour: Flavour) -> str:
    """The statement; TorchTitan's rotary table is as long as a sequence."""
    length = config["training.seq_len"]
    # Until August 2026 wavelengths of latent attention were stretched for sequences beyond the original length alone.
    plain = flavour.has_latent_attention and not config.is_current and length <= _ORIGINAL
    stretching = "rope_scaling = 1.0" if plain else flavour.stretching
    options = [flavour.text, *([stretching] if stretching else []), f"max_seq_len = {length}"]
    return f"model {flavour.family}({', '.join(options)})"
