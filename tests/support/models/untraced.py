"""Models of blocks that do what torch's compiler traces only in part."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):
    """A residual layer, and what it does beside that, by name."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner, self.n, self.seen = what, nn.Sequential(nn.Linear(16, 16), nn.Tanh()), 0, []
        self.kept: torch.Tensor | None = None
        self.register_buffer("calls", torch.zeros(()))
        if what == "spectral_norm":
            nn.utils.parametrizations.spectral_norm(self.inner[0])
        if what == "weight_norm":
            nn.utils.weight_norm(self.inner[0])
        if what == "parametrized":
            nn.utils.parametrizations.weight_norm(self.inner[0])
        if what == "complex":
            self.factor = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        hooked = self if what.startswith("own") else self.inner
        if what.endswith("backward"):
            hooked.register_full_backward_hook(lambda module, gradients, given: None)
        if what.endswith("backward_pre"):
            hooked.register_full_backward_pre_hook(lambda module, given: None)
        if what.endswith("backward_old"):
            hooked.register_backward_hook(lambda module, gradients, given: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.what:
            case "counter":
                self.calls += 1
            case "in_place":
                self.calls.add_(1)
            case "number":
                self.n += 1
            case "same_number":
                self.n = 0
            case "new":
                self.samples = x.shape[0]
            case "tensor":
                self.kept = x.detach()
            case "undone":
                self.kept = x
                self.kept = None
            case "list":
                self.seen.append(1)
            case "branch":
                if x.mean() > 0:
                    return x
            case "assert":
                assert x.isfinite().all()
            case "guarded":
                if not torch.compiler.is_compiling() and x.isnan().any():
                    raise ValueError
            case "complex":
                return x + (self.inner(x) * self.factor).real
        return x + self.inner(x)


class Blocks(nn.Module):
    """An embedding, blocks, and a layer of logits."""

    def __init__(self, what: str, rows: str) -> None:
        super().__init__()
        self.rows, self.layers, self.head = rows, nn.ModuleList(Block(what) for _ in range(2)), nn.Linear(16, 256)
        self.embedding = (nn.EmbeddingBag if rows == "sparse_bag" else nn.Embedding)(
            256, 16, sparse=rows == "sparse_bag"
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.rows == "sparse_bag":
            x = self.embedding(tokens.reshape(-1, 1)).view(*tokens.shape, 16)
        else:
            x = F.embedding(tokens, self.embedding.weight, sparse=self.rows == "sparse_function")
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(what: str = "", rows: str = "") -> nn.Module:
    """Build a model by what its blocks do, and by how it looks rows up."""
    return Blocks(what, rows)
