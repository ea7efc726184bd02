"""Models with hooks of parameters, and with tensors that are neither parameters nor buffers."""

from __future__ import annotations

import torch
from torch import nn


class Table:
    """An object with a table."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Slotted:
    """An object with a table and no dictionary."""

    __slots__ = ("missing", "values")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Holding(nn.Module):
    """A decoder that keeps a table in a way of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        table = torch.arange(128, dtype=torch.float32)[:, None]
        if kind == "buffer":
            self.register_buffer("table", table, persistent=False)
        elif kind == "alias":
            self.register_buffer("places", table, persistent=False)
            self.table = self.places
        elif kind == "list":
            self.tables = [None, table]
        elif kind == "dictionary":
            self.tables = {"table": table}
        elif kind == "parameter":
            self.tables = [nn.Parameter(table)]
        elif kind == "object":
            self.holder = Table(table)
        elif kind == "slots":
            self.holder = Slotted(table)
        elif kind == "function":
            self.look_up = lambda: table
        elif kind == "class":
            self.__class__ = type("Holding", (Holding,), {"table": table})
        elif kind == "modules":
            self.layers = [nn.Linear(16, 16)]
        elif kind == "registered":
            self.layers = [self.head]
        elif kind == "host":
            self.table = torch.arange(128, dtype=torch.float32, device="cpu")[:, None]
        else:
            self.table = table
        if kind == "hook":
            self.head.weight.register_hook(lambda gradient: gradient * 0.5)
        elif kind == "accumulated":
            self.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        elif kind == "module_hook":
            self.head.register_full_backward_hook(lambda module, given, made: None)

    def looked_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return the table."""
        if self.kind in ("list", "parameter"):
            return self.tables[-1]
        if self.kind == "dictionary":
            return self.tables["table"]
        if self.kind in ("object", "slots"):
            return self.holder.values
        if self.kind == "function":
            return self.look_up()
        if self.kind in ("modules", "registered"):
            return self.layers[0](x).mean(-1, keepdim=True)[0]
        if self.kind == "computed_again" and self.table.device != x.device:
            self.table = torch.arange(128, dtype=x.dtype, device=x.device)[:, None]
        if self.kind == "moved" and self.table.device != x.device:
            self.table = self.table.to(x.device)
        return self.table.to(x.device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.kind == "unread" or self.kind.endswith(("hook", "accumulated")):
            return self.head(x)
        if self.kind == "shape":
            return self.head(x + torch.ones(self.table.shape, dtype=self.table.dtype, device=x.device)[: x.shape[1]])
        return self.head(x + self.looked_up(x)[: tokens.shape[1]])


def build(kind: str) -> nn.Module:
    """Build a model by its kind."""
    return Holding(kind)
