"""Models that compute with modules without calling them, of one method each."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual feed-forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm.forward(x) if self.kind == "norm" else self.norm(x)
        up = self.up.forward(normal) if self.kind == "layer" else self.up(normal)
        return x + self.down(up.relu())

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Do the same by another name."""
        return self.forward(x)


class Bypassing(nn.Module):
    """A decoder whose blocks are computed in a way: by a call, or by `forward`, `method` or their `inside`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(256, 16)
        if kind == "inside":
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        else:
            self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.kind == "method":
                x = block.run(x)
            elif self.kind == "forward":
                x = block.forward(x)
            else:
                for module in block if self.kind == "inside" else (block,):
                    x = module(x)
        return self.head(x)


def build(kind: str) -> nn.Module:
    """Build a model by its kind."""
    return Bypassing(kind)
