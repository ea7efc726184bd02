"""Models in which some parameters have no gradients: frozen ones, and those of modules that are not called."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        self.added = nn.Linear(dim, dim // 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        # `added` is not called: its weight is read.
        return (
            x
            + self.down(F.gelu(self.up(hidden)))
            + F.linear(F.linear(hidden, self.added.weight), self.added.weight.t())
        )


class Model(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def whole(dim: int = 16, depth: int = 2) -> nn.Module:
    return Model(dim, depth)


def added_layers(dim: int = 16, depth: int = 2) -> nn.Module:
    """Of blocks only the layers are trained that were added to them."""
    model = Model(dim, depth)
    for name, parameter in model.layers.named_parameters():
        parameter.requires_grad_("added" in name)
    return model


def head_alone(dim: int = 16, depth: int = 2) -> nn.Module:
    model = Model(dim, depth)
    model.embed.requires_grad_(False)
    model.layers.requires_grad_(False)
    return model


def spare_layer(dim: int = 16, depth: int = 2) -> nn.Module:
    """A layer is never called."""
    model = Model(dim, depth)
    model.spare = nn.Linear(dim, 64 * dim, bias=False)
    return model


def spare_tied(dim: int = 16, depth: int = 2) -> nn.Module:
    """The layer that is never called shares its weight with one that is."""
    model = Model(dim, depth)
    model.another = nn.Linear(dim, 256, bias=False)
    model.another.weight = model.output.weight
    return model


class Fixed(nn.Embedding):
    """An embedding beyond which no gradient goes."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().forward(tokens)


def partly(kind: str, dim: int = 16, depth: int = 4) -> nn.Module:
    """A model of which a part is frozen."""
    if kind == "parts of blocks":
        return added_layers(dim, depth)
    model = Model(dim, depth)
    if kind == "embedding without gradients":
        model.embed = Fixed(256, dim)
    elif kind == "unused":
        model.spare = nn.Linear(dim, dim)
    elif kind == "tied":
        model.output.weight = model.embed.weight
    first, last = model.layers[: depth // 2], model.layers[depth // 2 :]
    frozen = {
        "first blocks": (model.embed, *first),
        "last blocks": (*last, model.norm, model.output),
        "unused": (getattr(model, "spare", model),),
    }
    for module in frozen.get(kind, (model.embed,)):
        module.requires_grad_(False)
    return model
