"""GPT-2 and GPT-3 as one device would run them."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models.configs import GPTConfig
from legoai.specs.models.layers import Embedding, Linear, residual_std


class Attention(nn.Module):
    """Causal multi-head attention; queries, keys and values have a linear layer each."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_heads
        self.head_dim = config.head_size
        self.wq = Linear(config.dim, config.dim, bias=config.bias)
        self.wk = Linear(config.dim, config.dim, bias=config.bias)
        self.wv = Linear(config.dim, config.dim, bias=config.bias)
        self.wo = Linear(config.dim, config.dim, bias=config.bias, init_std=residual_std(config.n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions: [B, T, dim] to [B, T, dim]."""
        b, t, _ = x.shape
        q_bhtd = self.wq(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        k_bhtd = self.wk(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        v_bhtd = self.wv(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        mixed_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        return self.wo(mixed_bhtd.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """`down(gelu(up x))`, with the tanh form of GELU that GPT-2 was trained with."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.dim, config.hidden_dim, bias=config.bias)
        self.down = Linear(config.hidden_dim, config.dim, bias=config.bias, init_std=residual_std(config.n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself: [..., dim] to [..., dim]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Advance the residual stream by one block: [B, T, dim] to [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020), from token ids [B, T] to logits [B, T, vocab_size].

    Modules: `tok_embeddings`, `pos_embeddings`, `layers.N.{attention_norm, attention.{wq,wk,wv,wo}, mlp_norm,
    mlp.{up,down}}`, `norm`, `output`. Without dropout, as both are trained today.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.pos_embeddings = Embedding(config.max_seq_len, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the next token at every position.

        Args:
            tokens: token ids, int64 [B, T]; on a pipeline stage without `tok_embeddings`, the residual
                stream [B, T, dim].
            positions: place of each of the T tokens in its sequence, int64 [T]; by default 0 to T - 1.

        Returns:
            Logits [B, T, vocab_size]; on a pipeline stage without `output`, the residual stream [B, T, dim].

        Raises:
            ValueError: the sequence is longer than `max_seq_len`.
        """
        h = tokens
        if self.tok_embeddings is not None:
            t, limit = tokens.shape[1], self.config.max_seq_len
            if t > limit:
                raise ValueError(f"a sequence of {t} tokens is longer than max_seq_len = {limit}")
            if positions is None:
                positions = torch.arange(t, device=tokens.device)
            # Positions keep a batch dim, so that both embeddings have their sequence in dim 1 when it is sharded.
            h = self.tok_embeddings(tokens) + self.pos_embeddings(positions.unsqueeze(0))
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h

    def example_inputs(self) -> tuple[torch.Tensor]:
        """Return token ids [2, T] for the shortest useful T, on the default device."""
        return (torch.zeros(2, min(8, self.config.max_seq_len), dtype=torch.int64),)
