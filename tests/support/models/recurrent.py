"""Models that combine tokens by a recurrent layer."""

from __future__ import annotations

import torch
from torch import nn


class Own(nn.LSTM):
    """A recurrent layer of another class than torch's."""


class Recurrent(nn.Module):
    """An embedding, a recurrent layer or a cell, and a layer of logits."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        made = Own if layer == "Own" else getattr(nn, layer)
        self.mixer = made(16, 16) if layer.endswith("Cell") else made(16, 16, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if isinstance(self.mixer, nn.RNNBase):
            return self.head(self.mixer(x)[0])
        state = torch.zeros_like(x[:, 0])
        states = []
        for index in range(x.shape[1]):
            state = self.mixer(x[:, index], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


def build(layer: str) -> nn.Module:
    """Build a model by the class of its layer."""
    return Recurrent(layer)
