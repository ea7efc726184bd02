"""Models that differ in their last layer, and in what their forward does with it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.models.factories import Decoder


class Subclass(nn.Linear):
    """A linear layer that may compute anything."""


class Headed(Decoder):
    """A decoder whose last layer is of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(depth=2, dim=16)
        self.kind = kind
        self.register_buffer("largest", torch.zeros(self.head.out_features), persistent=False)
        if kind == "hook":
            self.head.register_forward_hook(lambda _, __, logits: logits * 0.5)
        elif kind == "hook_of_weight":
            self.head.weight.register_hook(lambda gradient: gradient * 3)
        elif kind == "hook_before":
            self.head.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
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
        logits = checkpoint(self.head, x, use_reentrant=True) if self.kind == "reentrant" else self.head(x)
        return self.looked_at(logits)

    def looked_at(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, with which the kind may do something else too."""
        if self.kind == "scaled":
            return logits * 0.5
        if self.kind == "shape" and logits.shape[-1] != self.head.out_features:
            raise ValueError
        if self.kind == "dims":
            assert logits.ndim == 3 and logits.device == self.head.weight.device
        if self.kind == "largest":
            self.largest.copy_(logits.detach().amax((0, 1)))
        if self.kind == "kept":
            self.kept = [logits]
        if self.kind == "detached":
            self.kept = logits.detach()
        if self.kind == "evaluation" and not self.training:
            return logits.softmax(-1)
        return logits


def build(kind: str) -> nn.Module:
    """Build a model by its kind."""
    return Headed(kind)
