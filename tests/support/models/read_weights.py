"""Models whose forward reads or changes weights of modules that it does not call, or decides by values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from support.models.factories import Decoder


class Block(nn.Module):
    """A feed-forward whose last layer is called, or whose weights are passed to a function."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Direct(Block):
    """Passes weights to a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(F.gelu(self.up(self.norm(x))), self.down.weight, self.down.bias)


class OnlyDtype(Block):
    """Reads the dtype of weights that it does not compute with."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.unused = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.unused.weight
        return super().forward(x.to(weight).type_as(weight))


class Attending(nn.Module):
    """Attention of torch, which reads the weights of its `out_proj`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Following(Block):
    """Has a slow copy of a layer, which follows it by a moving average."""

    def __init__(self, dim: int, how: str) -> None:
        super().__init__(dim)
        self.slow, self.how = nn.Linear(dim, dim), how
        self.slow.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "in_place":
                self.slow.weight.mul_(0.5).add_(self.up.weight, alpha=0.5)
            elif self.how == "data":
                self.slow.weight.data = self.slow.weight.data * 0.5 + self.up.weight.data * 0.5
            else:
                self.slow.weight.data = self.slow.weight.data.to(torch.float32)
        return super().forward(x) - self.slow(x)


class Skipped(Block):
    """Skips itself at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and torch.rand([]) < 0.5 else super().forward(x)


class Tied(Decoder):
    """Computes logits with the weights of its embedding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embeddings.weight)


def build(kind: str, depth: int = 2, dim: int = 16, **embedding: Any) -> nn.Module:
    """A model of a kind of blocks, with options for its embedding."""
    model = Tied(depth, dim) if kind == "tied" else Decoder(depth, dim)
    made = {
        "direct": Direct,
        "only_dtype": OnlyDtype,
        "attending": Attending,
        "skipped": Skipped,
        "in_place": lambda dim: Following(dim, "in_place"),
        "data": lambda dim: Following(dim, "data"),
        "same": lambda dim: Following(dim, "same"),
        "sequential": lambda dim: nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim)),
    }.get(kind, Block)
    model.blocks = nn.ModuleList([made(dim) for _ in range(depth)])
    if embedding:
        model.embeddings = nn.Embedding(256, dim, **embedding)
    return model
