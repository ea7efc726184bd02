"""Differences between the steps of a training, which keep a model's step from being one graph."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from legoai.specs.models.manifests.described.forwards.step_changes import step_changes
from legoai.specs.models.torch_internals import meta_device

WIDTH = 8


class Model(nn.Module):
    """A layer, and what a subclass does with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.layer(x))

    def more(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Counting(Model):
    calls = 0

    def more(self, x):
        self.calls += 1
        return x


class Warming(Model):
    """Does not count beyond its second call."""

    warm = False

    def more(self, x):
        self.warm = True
        return x


class Module(nn.Module):
    """A counter that is no attribute of a module."""

    calls = [0]  # noqa: RUF012


class Elsewhere(Model):
    def more(self, x):
        Module.calls[0] += 1
        return x / Module.calls[0]


class Remembering(Model):
    last = None

    def more(self, x):
        self.last = x.detach()
        return x


class Appending(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def more(self, x):
        self.seen.append(1.0)
        return x


class DropsLayer(Model):
    def more(self, x):
        return x if random.random() < 0.001 else x * 2


class DrawsOnHost(Model):
    def more(self, x):
        return x * float(torch.rand((), device="cpu"))


class DrawsByNumPy(Model):
    def more(self, x):
        return x if np.random.rand() < 0.001 else x * 2


class Drops(Model):
    def more(self, x):
        return F.dropout(x, 0.5)


class Recomputes(Model):
    drop = 0.0

    def more(self, x):
        return checkpoint(lambda item: F.dropout(item, self.drop), x, use_reentrant=False)


class RecomputesDropout(Recomputes):
    drop = 0.5


class Unused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Detached(Unused):
    def more(self, x):
        return x * self.scale.detach()


class Frozen(Unused):
    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


class Compiled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer.compile(backend="eager")


class Mapped(Model):
    def more(self, x):
        return torch.vmap(self.layer)(x)


class MappedFunction(Model):
    def more(self, x):
        return torch.vmap(torch.sin)(x)


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return gradient if x.sum().item() > 0 else -gradient


class ReadsInBackward(Model):
    def more(self, x):
        return _Reads.apply(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Model, None),
        (Counting, "each forward sets `calls` anew"),
        (Warming, None),
        (Elsewhere, "its second step has other operators than its first, from `aten.div.Tensor` on"),
        (Remembering, "each forward sets `last` anew"),
        (Appending, "each forward sets `seen` anew"),
        (DropsLayer, "forward draws random numbers on the host"),
        (DrawsOnHost, "forward draws random numbers on the host"),
        (DrawsByNumPy, "forward draws random numbers on the host"),
        (Drops, None),
        (Recomputes, None),
        (RecomputesDropout, "it recomputes modules that draw random numbers"),
        (Unused, "no gradient reaches `scale`"),
        (Detached, "no gradient reaches `scale`"),
        (Frozen, None),
        (Compiled, "it cannot be traced: Detected that you are using FX to symbolically trace"),
        (Mapped, "it cannot be traced: a transform of `torch.func` calls a `Linear` with parameters"),
        (MappedFunction, None),
        (ReadsInBackward, "it cannot be traced: "),
    ],
)
def test_reason_why_later_steps_are_not_the_first_one(kind: type[nn.Module], reason: str | None) -> None:
    with meta_device():
        model = kind()
        attributes = dict(vars(model))
        found = step_changes(model, (torch.zeros(2, WIDTH),))
    assert (found or "").startswith(reason or "") and (found is None) == (reason is None), found
    assert vars(model) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
