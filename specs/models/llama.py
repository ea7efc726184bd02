"""Llama 3 as one device would run it."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models.configs import LlamaConfig
from legoai.specs.models.decoder import Attention, RotaryDecoder, TransformerBlock
from legoai.specs.models.layers import Linear, residual_std


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, hidden_dim: int, *, n_layers: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, bias=bias)
        self.w2 = Linear(hidden_dim, dim, bias=bias, init_std=residual_std(n_layers))
        self.w3 = Linear(dim, hidden_dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself: [..., dim] to [..., dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(RotaryDecoder):
    """Llama 3, 3.1 and 3.2 (Grattafiori et al. 2024), by token ids [B, T] to logits [B, T, vocab_size].

    Modules: `tok_embeddings`, `layers.N.{attention_norm, attention.{wq,wk,wv,wo}, ffn_norm,
    feed_forward.{w1,w2,w3}}`, `norm`, `output`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        def block(index: int) -> TransformerBlock:
            feed_forward = FeedForward(config.dim, config.hidden_dim, n_layers=config.n_layers, bias=config.mlp_bias)
            return TransformerBlock(config, feed_forward=feed_forward, attention=Attention(config))

        super().__init__(config, block)
