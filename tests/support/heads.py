"""Models that differ in their last layer, and in what their forward does with it."""

from __future__ import annotations

import torch
from torch import nn

from support.factories import Decoder


class Subclass(nn.Linear):
    """A linear layer that may compute anything."""


class Headed(Decoder):
    """A decoder whose last layer is of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(depth=2, dim=16)
        self.kind = kind
        if kind == "hook":
            self.head.register_forward_hook(lambda _, __, logits: logits * 0.5)
        elif kind == "weight_norm":
            nn.utils.weight_norm(self.head)
        elif kind in ("subclass", "bias"):
            made = Subclass if kind == "subclass" else nn.Linear
            self.head = made(self.head.in_features, self.head.out_features, bias=kind == "bias")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        if self.kind == "reading":
            x = x.to(self.head.weight.dtype)[..., : self.head.in_features]
        if self.kind == "twice":
            return self.head(self.head(x)[..., : self.head.in_features])
        if self.kind == "flat":
            x = x.flatten(0, 1)
        logits = self.head(x)
        return logits * 0.5 if self.kind == "scaled" else logits


def build(kind: str) -> nn.Module:
    """Build a model by its kind."""
    return Headed(kind)
