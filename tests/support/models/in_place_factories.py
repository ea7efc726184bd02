"""Models whose forward changes tensors in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from support.models.factories import Decoder


class Residual(nn.Module):
    """Adds to the result of a layer, in place or not."""

    def __init__(self, dim: int, in_place: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, dim, bias=False)
        self.act = nn.ReLU(inplace=in_place)
        self.down = nn.Linear(dim, dim, bias=False)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.act(self.up(self.norm(x))))
        if not self.in_place:
            return hidden + x
        hidden += x
        return hidden


class Views(Residual):
    """Has layers with bias, whose results are views of products."""

    def __init__(self, dim: int, in_place: bool) -> None:
        super().__init__(dim, in_place)
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)


class Positioned(Residual):
    """Changes its own input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[:] += 1.0
        return super().forward(x)


class Biased(Residual):
    """Changes an argument without a gradient."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bias += 1.0
        return super().forward(x + bias)


class Constant(Decoder):
    """Gives its blocks a bias that is made of constants."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        bias = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


class Summed(Decoder):
    """Gives its blocks new tensors, not those that modules returned."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x + 1.0)
        return self.head(x)


class Gated(nn.Module):
    """Returns a product beside what it computes from it, or from its input."""

    def __init__(self, dim: int, is_used: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim, bias=False)
        self.is_used = is_used

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(x)
        return (scores if self.is_used else x).sigmoid(), scores


class Scored(nn.Module):
    """Changes one of the two results of a module."""

    def __init__(self, dim: int, is_used: bool) -> None:
        super().__init__()
        self.router = Gated(dim, is_used)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, scores = self.router(x)
        scores -= 3.0
        return x + self.out(scores.sigmoid()) * weights


class Cast(Residual):
    """Changes a cast of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y -= 1.0
        return super().forward(y.type_as(x))


class CastAsWeight(Residual):
    """Changes its input by a cast that does nothing where the input has the dtype of parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.up.weight.dtype)
        y -= 1.0
        return super().forward(y)


class CastBetween(Decoder):
    """Changes a cast of what its head returns."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens).float()
        logits *= 0.5
        return logits


class Noisy(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(super().forward(x), training=self.training)


class Between(Decoder):
    """Changes what the last block returns."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        x *= 2.0
        return self.head(x + 1.0)


def build(kind: str, depth: int = 2, dim: int = 16) -> nn.Module:
    """A model that changes nothing in place (`none`), results, the inputs of blocks, or tensors between blocks."""
    model = {"between": Between, "constant": Constant, "sums": Summed, "cast_between": CastBetween}.get(kind, Decoder)(
        depth, dim
    )
    block = {
        "inputs": Positioned,
        "views": Views,
        "sums": Positioned,
        "cast": Cast,
        "cast_as_weight": CastAsWeight,
        "constant": Biased,
        "noise": Noisy,
        "used": Scored,
        "unused": Scored,
    }.get(kind, Residual)
    model.blocks = nn.ModuleList([block(dim, kind in ("results", "used", "views")) for _ in range(depth)])
    return model
