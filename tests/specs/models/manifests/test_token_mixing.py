"""Models that combine tokens of a sequence outside of attention are told from those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from legoai.specs.models.build import build_model
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.source import ModelSource
from legoai.specs.models.torch_internals import meta_device

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Causal attention by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        return self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Written(Attention):
    """Attention as products and a softmax."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Summed(Attention):
    """Linear attention, whose products are written with `einsum`."""

    def forward(self, x):
        q, k, v = self.heads(x)
        state = torch.einsum("bhtd,bhte->bhde", k, v)
        return self.out(torch.einsum("bhtd,bhde->bhte", q, state).transpose(1, 2).flatten(2))


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return x + self.function(x)


class Convolution(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, groups=WIDTH, padding=kernel - 1)

    def forward(self, x):
        return x + self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Recurrent(nn.Module):
    """A loop over tokens."""

    def forward(self, x):
        state, found = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = 0.5 * state + token
            found.append(state)
        return torch.stack(found, 1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class MoE(nn.Module):
    """Tokens that are sorted by expert, and counted; nothing of one token reaches another."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        rows = x.flatten(0, 1)
        share = self.router(rows).softmax(-1)
        order = share.argmax(-1).argsort()
        load = share.mean(0)
        return x + (self.experts[0](rows[order])[order.argsort()] * load.sum()).view_as(x)


class Net(nn.Module):
    def __init__(self, *parts: nn.Module, positions: bool = True) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, WIDTH), nn.ModuleList(nn.Sequential(part) for part in parts)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.register_buffer("angles", torch.zeros(64, WIDTH), persistent=False)

    def forward(self, tokens, positions=None):
        angles = self.angles[: tokens.shape[1]] if positions is None else self.angles[positions]
        x = self.embed(tokens) + angles
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Unplaced(Net):
    def forward(self, tokens):  # type: ignore[override]
        return super().forward(tokens)


def found(model: Callable[[], nn.Module]) -> dict[str, str]:
    with meta_device():
        built = model()
    manifest = describe(built, "test", shapes=True)
    assert manifest.flow_error is None
    return {path: module.mixes_tokens for path, module in manifest.modules.items() if module.mixes_tokens}


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (lambda x: functional.pad(x, (0, 0, 1, 0))[:, :-1], "pad"),
        (lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1), "getitem"),
        (lambda x: x.roll(1, 1), "roll"),
        (lambda x: torch.roll(x, 1, dims=1), "roll"),
        (lambda x: x.flip(1), "flip"),
        (lambda x: x.cumsum(dim=1), "cumsum"),
        (lambda x: x.mean(1, keepdim=True), "mean"),
        (lambda x: x[:, -1:].expand_as(x), "getitem"),
        (lambda x: x.narrow(1, 0, 1), "narrow"),
        (lambda x: x.softmax(1), "softmax"),
        (lambda x: torch.fft.fft(x, dim=1).real, "fft_fft"),
        (lambda x: functional.layer_norm(x, x.shape[1:]), "layer_norm"),
        (lambda x: functional.group_norm(x.transpose(1, 2), 4).transpose(1, 2), "group_norm"),
        (lambda x: functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), "avg_pool1d"),
        (lambda x: (x.transpose(1, 2) @ x) .sum() * x, "matmul"),
    ],
)  # fmt: skip
def test_functions_that_combine_tokens_are_found(part, name):
    assert found(lambda: Net(Attention(), Function(part))) == {"layers.1.0": name}


@pytest.mark.parametrize(
    ("part", "where", "name"),
    [
        (Written, "layers.1.0", "softmax"),
        (Summed, "layers.1.0", "einsum"),
        (lambda: Convolution(4), "layers.1.0.conv", "conv1d"),
        (Recurrent, "layers.1.0", "getitem"),
        (Lstm, "layers.1.0.cell", "lstm"),
    ],
)
def test_modules_that_combine_tokens_are_found(part, where, name):
    assert found(lambda: Net(Attention(), part()))[where] == name


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@pytest.mark.parametrize(
    "part",
    [
        Attention,
        MoE,
        lambda: Convolution(1),
        lambda: Function(rotated),
        lambda: Function(
            lambda x: x.view(*x.shape[:2], HEADS, -1).mean(-1, keepdim=True).expand(-1, -1, -1, 8).flatten(2)
        ),
        lambda: Function(lambda x: x.flatten(0, 1).relu().square().unflatten(0, x.shape[:2])),
        lambda: Function(lambda x: functional.layer_norm(x, x.shape[2:])),
        lambda: Function(lambda x: torch.einsum("btd,ed->bte", x, torch.zeros(WIDTH, WIDTH))),
        lambda: Function(lambda x: x * x.square().mean(-1, keepdim=True).rsqrt()),
        lambda: Function(lambda x: x + 0.0 * x.square().mean()),
        lambda: Function(lambda x: x[:, :, : WIDTH // 2].repeat(1, 1, 2)),
        lambda: Function(lambda x: torch.cat([piece.relu() for piece in x.chunk(2, 1)], 1)),
        lambda: Function(lambda x: torch.cat([piece.relu() for piece in x.split(2, 1)], 1)),
    ],
)  # fmt: skip
def test_functions_of_single_tokens_and_attention_are_not_found(part):
    assert found(lambda: Net(Attention(), part())) == {}


@pytest.mark.parametrize(
    ("family", "preset"), [("llama3", "tiny"), ("gpt2", "small"), ("mixtral", "tiny"), ("deepseek", "tiny")]
)
def test_the_projects_own_decoders_combine_tokens_by_attention_alone(family, preset):
    source = ModelSource(kind="builtin", target=family, preset=preset)
    assert found(lambda: build_model(source, ".")) == {}


def test_models_without_positions_are_not_looked_at():
    assert found(lambda: Unplaced(Written())) == {}
