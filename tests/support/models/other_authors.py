"""Models with parts that their authors wrote without thinking of a training in other dtypes, or on other devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

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


class Buffered(Plain):
    """Adds a buffer in fp32 to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x + self.offset))


class Multiplied(Buffered):
    """Multiplies its input by a buffer in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x @ self.offset.expand(WIDTH, WIDTH))


class Made(Plain):
    """Scales its input by a tensor in fp32 that forward makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x * torch.linspace(0, 1, WIDTH, device=x.device))


class MadeMatrix(Plain):
    """Multiplies its input by a matrix in fp32 that forward makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x @ torch.eye(WIDTH, device=x.device))


class _AddLoss(torch.autograd.Function):
    """The first argument; backward adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


class Balanced(Plain):
    """Adds a loss of means over the samples to the gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return _AddLoss.apply(x, x.mean((0, 1)).square().sum())


class Dropping(Plain):
    """Drops some of its layer's results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.layer(self.norm(x)), 0.1, self.training)


class Hooked(Plain):
    """Changes what its layer gives and gets by hooks, and recomputes its norm itself."""

    def made(self) -> nn.Module:
        layer = super().made()
        layer.register_forward_hook(lambda module, args, result: result * 2)
        layer.register_full_backward_hook(lambda module, arrived, given: (arrived[0] * 0.5,))
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False))


class Normalised(Plain):
    """Normalises its layer's results by the statistics of a batch."""

    def made(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x)).view_as(x)


class Shared(Plain):
    """Has one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layer


class Rotated(Buffered):
    """Attends with queries and keys in fp32, and values in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v = (x * self.offset).unsqueeze(1), x.unsqueeze(1)
        return x + nn.functional.scaled_dot_product_attention(q, q, v).squeeze(1)


class Cast(Buffered):
    """Casts what it computes with its buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.dtype == torch.float32 else x + self.layer(x + self.offset.to(x.dtype))


class Autocast(Buffered):
    """Lets autocast choose dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for device in (x.device.type, "cuda"):
            with torch.autocast(device, torch.bfloat16):
                x = x + self.layer(x + self.offset).to(x.dtype)
        return x


class Shifted(Model):
    """Adds a buffer in fp32 before the blocks."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.register_buffer("offset", torch.randn(WIDTH) / 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Nested(nn.Module):
    """A model inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(Plain)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


_BLOCKS: Final[Mapping[str, type[nn.Module]]] = {
    "plain": Plain,
    "compiled": Compiled,
    "compiled_in_place": CompiledInPlace,
    "checkpointed": Checkpointed,
    "buffered": Buffered,
    "multiplied": Multiplied,
    "made": Made,
    "made_matrix": MadeMatrix,
    "balanced": Balanced,
    "dropping": Dropping,
    "hooked": Hooked,
    "normalised": Normalised,
    "shared": Shared,
    "rotated": Rotated,
    "cast": Cast,
    "autocast": Autocast,
}


def build(kind: str = "plain") -> nn.Module:
    """Return a model with blocks of a kind."""
    if kind == "nested":
        return Nested()
    return Shifted(Plain) if kind == "shifted" else Model(_BLOCKS[kind])
