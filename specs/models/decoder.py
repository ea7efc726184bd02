"""The decoder that Llama, Mixtral and DeepSeek share: rotary positions and pre-norm blocks; grouped-query attention."""

# mypy: no-warn-return-any
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models.configs import DeepSeekConfig, LlamaConfig, MixtralConfig
from legoai.specs.models.layers import Embedding, Linear, residual_std

DecoderConfig = LlamaConfig | MixtralConfig | DeepSeekConfig
"""Config of a decoder with rotary positions."""


def rotated_features(config: DecoderConfig) -> int:
    """Return how many features of a head are rotated."""
    return config.rope_head_dim if isinstance(config, DeepSeekConfig) else config.head_size


def rotary_frequencies(config: DecoderConfig) -> list[float]:
    """Return the angle per position, in radians, of each rotated pair of a head's features.

    Of `n` rotated features, pair i turns by `theta ** (-2 i / n)` (Su et al. 2021, section 3.2.2). A longer context
    slows pairs down by `rope_scaling`, as `rope_type` says; those of DeepSeek as YaRN does.
    """
    rotated = rotated_features(config)
    frequencies = [config.rope_theta ** (-2 * i / rotated) for i in range(rotated // 2)]
    if isinstance(config, MixtralConfig) or config.rope_scaling == 1:
        return frequencies
    kept = _KEPT["yarn" if isinstance(config, DeepSeekConfig) else config.rope_type](config, frequencies)
    return [
        frequency * (share + (1 - share) / config.rope_scaling)
        for frequency, share in zip(frequencies, kept, strict=True)
    ]


def _kept_by_llama3(config: Any, frequencies: list[float]) -> list[float]:
    """Pairs with short wavelengths keep their frequency, those with long ones do not, with a linear blend between.

    As `apply_scaling` of the Llama models repository; the blend is linear in the turns over the original length.
    """
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = (config.rope_original_seq_len * frequency / (2 * math.pi) for frequency in frequencies)
    return [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]


def _kept_by_yarn(config: LlamaConfig | DeepSeekConfig, frequencies: list[float]) -> list[float]:
    """The same with a blend that is linear in the number of the pair (Peng et al. 2023, section 3.2).

    It goes from the last pair that turns `rope_beta_fast` times over the original length to the first that turns
    `rope_beta_slow` times, both rounded to whole pairs as in the code of the paper.
    """
    rotated = rotated_features(config)

    def pair_of(turns: float) -> float:
        ratio = config.rope_original_seq_len / (turns * 2 * math.pi)
        return rotated * math.log(ratio) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_of(config.rope_beta_fast)), 0)
    last = min(math.ceil(pair_of(config.rope_beta_slow)), rotated - 1)
    width = last - first or 0.001
    return [1 - min(max((pair - first) / width, 0.0), 1.0) for pair in range(len(frequencies))]


_KEPT: Final[Mapping[str, Callable[[Any, list[float]], list[float]]]] = {
    "llama3": _kept_by_llama3,
    "linear": lambda config, frequencies: [0.0] * len(frequencies),
    "yarn": _kept_by_yarn,
}
"""By `rope_type`, the share of its frequency that each pair keeps, from 0 to 1."""


def rotary_factor(config: DecoderConfig) -> float:
    """Return the factor of rotated queries and keys, which is 1 but for YaRN (Peng et al. 2023, section 3.4).

    DeepSeek scales all scores instead, those of features without positions too: `rope_mscale`.
    """
    if isinstance(config, MixtralConfig | DeepSeekConfig) or config.rope_type != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(config.rope_scaling) + 1


def apply_rotary(x: torch.Tensor, rope: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate each head's features by the angles of their positions.

    Feature i of a head is paired with feature `i + head_dim / 2`, the layout of Hugging Face checkpoints; interleaved,
    feature `2 i` with the next, the layout of DeepSeek's.

    Args:
        x: queries or keys, [B, T, heads, head_dim].
        rope: `factor exp(i angle)`, complex, [T, head_dim / 2].
        interleaved: how features are paired.

    Returns:
        A tensor like `x`, computed in the higher precision of the two, with the first features of all pairs before the
        second ones.
    """
    cos, sin = torch.view_as_real(rope).unsqueeze(1).unbind(-1)
    left, right = x.view(*x.shape[:-1], -1, 2).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: LlamaConfig | MixtralConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_size
        # Not compared in forward: under `torch.compile(dynamic=True)` sizes are symbols in a unit of FSDP, and no flag.
        self.is_grouped = config.n_kv_heads != config.n_heads
        bias = config.qkv_bias or config.attention_bias
        self.wq = Linear(config.dim, config.n_heads * config.head_size, bias=bias)
        self.wk = Linear(config.dim, config.n_kv_heads * config.head_size, bias=bias)
        self.wv = Linear(config.dim, config.n_kv_heads * config.head_size, bias=bias)
        self.wo = Linear(
            config.n_heads * config.head_size,
            config.dim,
            bias=config.attention_bias,
            init_std=residual_std(config.n_layers),
        )
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Mix positions: `x` is [B, T, dim], `rope` is [at least T, head_dim / 2]; returns [B, T, dim]."""
        b, t, _ = x.shape
        q_bthd = self.wq(x).view(b, t, -1, self.head_dim)
        q_bthd = apply_rotary(q_bthd if self.q_norm is None else self.q_norm(q_bthd), rope[:t])
        k_bthd = self.wk(x).view(b, t, -1, self.head_dim)
        k_bthd = apply_rotary(k_bthd if self.k_norm is None else self.k_norm(k_bthd), rope[:t])
        v_bthd = self.wv(x).view(b, t, -1, self.head_dim)
        mixed_bhtd = F.scaled_dot_product_attention(
            q_bthd.transpose(1, 2),
            k_bthd.transpose(1, 2),
            v_bthd.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        return self.wo(mixed_bhtd.transpose(1, 2).reshape(b, t, -1))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, feed_forward: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Advance the residual stream by one block: [B, T, dim] to [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class RotaryDecoder(nn.Module):
    """Token embedding, blocks, final norm and output layer around one table of rotary angles."""

    rope: torch.Tensor

    def __init__(self, config: DecoderConfig, block: Callable[[int], TransformerBlock]) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): block(i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope", self._rotary_table(torch.get_default_device()), persistent=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the next token at every position.

        Args:
            tokens: token ids, int64 [B, T]; on a pipeline stage without `tok_embeddings`, the residual
                stream [B, T, dim].
            positions: place of each of the T tokens in its sequence, int64 [T]; by default 0 to T - 1. A
                context-parallel rank, which holds a part of the sequence, has to give it.

        Returns:
            Logits [B, T, vocab_size]; on a pipeline stage without `output`, the residual stream [B, T, dim].

        Raises:
            ValueError: the sequence is longer than `max_seq_len`.
        """
        h = tokens
        if self.tok_embeddings is not None:
            if tokens.shape[1] > len(self.rope):
                raise ValueError(
                    f"a sequence of {tokens.shape[1]} tokens is longer than max_seq_len = {len(self.rope)}"
                )
            h = self.tok_embeddings(tokens)
        rope = self.rope if positions is None else self.rope[positions]
        for layer in self.layers.values():
            h = layer(h, rope)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h

    def init_buffers(self) -> None:
        """Recompute the rotary table, on its device."""
        self.rope = self._rotary_table(self.rope.device)

    def example_inputs(self) -> tuple[torch.Tensor]:
        """Return token ids [2, T] for the shortest useful T, on the default device."""
        return (torch.zeros(2, min(8, self.config.max_seq_len), dtype=torch.int64),)

    def _rotary_table(self, device: torch.device) -> torch.Tensor:
        """Return `factor exp(i angle)` of every position and pair, complex [max_seq_len, rotated pairs].

        The table is complex, since FSDP2 casts the floating-point inputs of a unit to bf16, in which neighbouring far
        positions are one and the same, and leaves complex ones alone. Angles are computed in fp64 and rounded once.
        """
        frequencies = torch.tensor(rotary_frequencies(self.config), dtype=torch.float64, device=device)
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float64, device=device)
        angles = torch.outer(positions, frequencies)
        double = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return torch.polar(torch.full_like(angles, rotary_factor(self.config)), angles).to(
            torch.complex128 if double else torch.complex64
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move or cast parameters, and recompute the table instead of moving or rounding it."""
        rope = self._buffers.pop("rope")
        assert rope is not None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers["rope"] = rope
        device = fn(torch.empty(0, device=rope.device)).device
        self._buffers["rope"] = self._rotary_table(device)
        return self
