"""Models of TorchTitan that are built-ins: the `model` statement of each flavour."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from legoai.dsl.diagnostics.codes.importing import UnknownConfigModel
from legoai.dsl.importing.config import Config


@dataclass(frozen=True, slots=True)
class Flavour:
    """A model in one size.

    Attributes:
        text: arguments of `llama3`: the preset, and dimensions that differ from it.
        layers: its number of blocks.
        tied: whether embedding and output layer share their weight.
    """

    text: str
    layers: int
    tied: bool = False


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
_THEN: Final = {"llama3": _llamas(old=True), "llama": _llamas(old=True)}
"""Until March 2025; the tokenizer of the tests had 2,256 tokens."""


def flavour_of(config: Config) -> Flavour | None:
    """Return the model that the config names; None, after a diagnostic, where it is not built in."""
    name, flavour = config["model.name"], config["model.flavor"]
    models = _THEN if config.is_old else _PYTHON if config.format.is_python else _NOW
    if config.format.is_python:
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
    return f"model llama3({flavour.text}, max_seq_len = {config['training.seq_len']})"
