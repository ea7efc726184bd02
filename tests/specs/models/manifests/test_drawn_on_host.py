"""Random numbers that a forward draws on the host, and the parameters whose use depends on them."""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.described.forwards.drawn_on_host import numbers_near_one
from legoai.specs.models.torch_internals import meta_device

WIDTH = 8


class Model(nn.Module):
    """Two layers, of which a subclass leaves out some."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = random.Random(0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.more(self.embed(tokens))

    def more(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Dropout(Model):
    def more(self, x):
        return super().more(nn.functional.dropout(x, 0.5))


class OwnGenerator(Model):
    def more(self, x):
        return x if self.own.random() < 0.5 else super().more(x)


class Scales(Model):
    def more(self, x):
        return super().more(x) * math.log(random.random())


class WaitsForUnequal(Model):
    """Draws until two numbers differ."""

    def more(self, x):
        x = super().more(x)
        while random.random() == random.random():
            x = x + 1
        return x


class SkipsRarely(Model):
    def more(self, x):
        return super().more(x) if random.random() >= 0.001 else self.first(x)


class SkipsByNumPy(Model):
    def more(self, x):
        return super().more(x) if np.random.rand() < 0.999 else self.second(x)


class SkipsByTorch(Model):
    def more(self, x):
        return super().more(x) if torch.rand((), device="cpu").item() < 0.5 else x


class Swaps(Model):
    def more(self, x):
        layers = [self.first, self.second]
        random.shuffle(layers)
        return layers[1](layers[0](x))


class LeavesOutBias(Model):
    def more(self, x):
        bias = self.first.bias if random.random() < 0.5 else None
        return self.second(nn.functional.linear(x, self.first.weight, bias))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Model, None),
        (Dropout, None),
        (OwnGenerator, None),
        (Scales, (("random",), "")),
        (WaitsForUnequal, (("random",), "")),
        (SkipsRarely, (("random",), "second.weight")),
        (SkipsByNumPy, (("numpy.random",), "first.weight")),
        (SkipsByTorch, (("torch",), "first.weight")),
        (Swaps, (("random",), "first.weight")),
        (LeavesOutBias, (("random",), "first.bias")),
    ],
)
def test_draws_are_found_and_what_they_decide(kind: type[nn.Module], found: tuple[tuple[str, ...], str] | None) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with meta_device():
        model = kind()
    assert describe(model, "test").host_draws == found
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_manifest_is_of_a_forward_that_skips_nothing() -> None:
    with meta_device():
        manifests = {describe(SkipsRarely(), "test") for _ in range(2)}
    [manifest] = manifests
    assert [step.name for step in manifest.modules[""].flow if step.op == "call"] == ["embed", "first", "second"]


def test_numbers_are_near_one() -> None:
    with numbers_near_one():
        drawn = *(random.random() for _ in range(100)), np.random.rand()
    assert min(drawn) > 1 - sys.float_info.epsilon
