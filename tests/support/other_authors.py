"""Models with parts that their authors wrote without thinking of a training in other dtypes, or on other devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WIDTH: Final = 32
TOKENS: Final = 256


class Model(nn.Module):
    """An embedding, two blocks and a layer of logits."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain(nn.Module):
    """A block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), self.made()

    def made(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


class Compiled(Plain):
    """Its layer is compiled by the model."""

    def made(self) -> nn.Module:
        return torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")


class CompiledInPlace(Plain):
    """Its layer is compiled by the model, and keeps its path."""

    def made(self) -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.compile(backend="eager")
        return layer


class Checkpointed(Plain):
    """Its layer is recomputed by the model."""

    def made(self) -> nn.Module:
        return checkpoint_wrapper(nn.Linear(WIDTH, WIDTH))


_BLOCKS: Final[Mapping[str, type[nn.Module]]] = {
    "plain": Plain,
    "compiled": Compiled,
    "compiled_in_place": CompiledInPlace,
    "checkpointed": Checkpointed,
}


def build(kind: str = "plain") -> nn.Module:
    """Return a model with blocks of a kind."""
    return Model(_BLOCKS[kind])
