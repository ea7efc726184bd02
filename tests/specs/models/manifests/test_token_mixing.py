"""Models that combine tokens of a sequence outside of attention are told from those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Rotary(Attention):
    """Attention whose queries and keys are turned by angles, looked up by position in a cache and computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, WIDTH // HEADS), persistent=False)
        self.register_buffer("frequencies", torch.zeros(WIDTH // HEADS // 2), persistent=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        positions = torch.arange(x.shape[1], device=x.device)
        cached = self.cache[positions + 0].type_as(x)
        angles = (self.frequencies[None, :, None] @ positions[None, None].float()).transpose(1, 2).type_as(x)
        cosines = torch.cat([angles, angles], -1).cos()[:, positions + 0] + cached
        q, k = (item * cosines + rotated(item) * cosines for item in (q, k))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Sparse(nn.Module):
    """Routed feed-forward that is not known as one: tokens, once for each choice, are sorted and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = x.flatten(0, 1)
        share, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        token = torch.arange(len(rows), device=x.device).repeat_interleave(2)[order]
        out = self.up(rows[token]) * share.flatten()[order, None]
        taken = torch.zeros_like(rows).index_add(0, token, out)
        again = rows.gather(0, (order // 2)[:, None].expand(-1, WIDTH))
        put_back = set_at(torch.zeros_like(again), order, again)
        return x + taken.view_as(x) + put_back.unflatten(0, (-1, 2)).sum(1).view_as(x)


class Batched(nn.Module):
    """Experts of which each token takes its weights, as `transformers` computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(WIDTH, 4), nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def forward(self, x):
        rows = x.flatten(0, 1)
        share, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        token = torch.arange(len(rows), device=x.device).unsqueeze(1).expand(-1, 2).reshape(-1)
        kept = self.gate(rows)[torch.arange(len(rows))[:, None], chosen].reshape(-1, 1)
        again = torch.arange(2 * len(rows)) // 2
        out = torch.bmm(self.weight[chosen.reshape(-1)], (rows[token] + rows[again]).unsqueeze(-1)).squeeze(-1) * kept
        return x + (out * share.reshape(-1, 1)).view(-1, 2, WIDTH).sum(1).view_as(x)


class Hashed(nn.Module):
    """Tokens that are sorted by what their ids are, and put back."""

    def forward(self, x):
        rows = x.flatten(0, 1)
        order = rows[:, 0].long().remainder(4).argsort()
        return x + rows[order].relu()[order.argsort()].view_as(x)


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


def groups_of(cases: list[Any]) -> list[list[Any]]:
    """Cases that are parts of one model, since a model is inspected in about the time of its attention."""
    return [cases[first : first + 10] for first in range(0, len(cases), 10)]


def mask_of(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1]).tril()


def reversed_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device).flip(0)


def written_by_view(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    read = out[..., :WIDTH]
    out.copy_(values)
    return read * 2


def kept_aside(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    return x


def set_at(out: torch.Tensor, index: object, values: torch.Tensor) -> torch.Tensor:
    out[index] = values
    return out


COMBINING = [
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
    (lambda x: mask_of(x) @ x, "matmul"),
    (lambda x: torch.bmm(mask_of(x).expand(len(x), -1, -1), x), "bmm"),
    (lambda x: torch.bmm(mask_of(x).expand(len(x), -1, -1), mat2=x), "bmm"),
    (lambda x: torch.baddbmm(x, mask_of(x).expand(len(x), -1, -1), x), "baddbmm"),
    (lambda x: torch.tensordot(mask_of(x), x, ([1], [1])).transpose(0, 1), "tensordot"),
    (lambda x: torch.tensordot(x.transpose(1, 2), mask_of(x), 1).transpose(1, 2), "tensordot"),
    (lambda x: torch.einsum("st,...td->...sd", mask_of(x), x), "einsum"),
    (lambda x: torch.einsum("btd,ts", x, mask_of(x)).transpose(1, 2), "einsum"),
    (lambda x: nn.ZeroPad2d((0, 0, 1, -1)).forward(x), "pad"),
    (lambda x: x.gather(1, reversed_of(x)[None, :, None].expand_as(x)), "gather"),
    (lambda x: x.take_along_dim(reversed_of(x)[None, :, None], 1), "take_along_dim"),
    (lambda x: x[:, reversed_of(x)], "getitem"),
    (lambda x: x[:, list(range(x.shape[1]))[::-1]], "getitem"),
    (lambda x: x[:, torch.rand(x.shape[1]).argsort()], "getitem"),
    (lambda x: x.flatten(0, 1).index_select(0, torch.arange(x.shape[0] * x.shape[1]).flip(0)).view_as(x),
     "index_select"),
    (lambda x: x[:, torch.arange(x.shape[1]) // 2], "getitem"),
    (lambda x: torch.zeros_like(x).index_add(1, reversed_of(x), x), "index_add"),
    (lambda x: torch.zeros_like(x).scatter(1, reversed_of(x)[None, :, None].expand_as(x), x), "scatter"),
    (lambda x: set_at(torch.zeros_like(x), (slice(None), reversed_of(x)), x), "setitem"),
    (lambda x: x[:, torch.arange(x.shape[1]) + 1 - 1], "getitem"),
    (lambda x: x[:, torch.arange(x.shape[1]).clamp(max=x.shape[1] - 2)], "getitem"),
    (lambda x: x[:, torch.arange(x.shape[1]).clamp(min=1)], "getitem"),
    (lambda x: x[:, 0 - torch.arange(x.shape[1])], "getitem"),
    (lambda x: x * x.detach().amax(1, keepdim=True), "amax"),
    (lambda x: torch.zeros_like(x).copy_(x.mean(1, keepdim=True)), "mean"),
    (lambda x: written_by_view(x.mean(1, keepdim=True), x), "mean"),
    (lambda x: torch.vmap(torch.sum)(x.cumsum(1))[:, None, None] * x, "cumsum"),
    (lambda x: x.cummax(1).values, "cummax"),
    (lambda x: x.diff(dim=1, prepend=x.new_zeros(len(x), 1, WIDTH)), "diff"),
    (lambda x: x.unfold(1, 2, 2).mean(-1).repeat_interleave(2, 1), "unfold"),
    (lambda x: torch.conv_tbc(x.transpose(0, 1).contiguous(), x.new_ones(3, WIDTH, WIDTH), x.new_zeros(WIDTH), 1)
     .transpose(0, 1), "conv_tbc"),
    (lambda x: x * functional.cosine_similarity(x, x)[:, None], "cosine_similarity"),
]  # fmt: skip


@pytest.mark.parametrize("cases", groups_of(COMBINING))
def test_functions_that_combine_tokens_are_found(cases):
    expected = {f"layers.{number}.0": name for number, (_, name) in enumerate(cases, start=1)}
    assert found(lambda: Net(Attention(), *(Function(part) for part, _ in cases))) == expected


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


def picked(rows: torch.Tensor) -> torch.Tensor:
    """Return the value of each row that is the likeliest, as a loss does of the targets."""
    return rows.log_softmax(-1)[torch.arange(len(rows)), rows.argmax(-1)]


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


OF_SINGLE_TOKENS = [
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
    Rotary,
    Sparse,
    Batched,
    Hashed,
    lambda: Function(lambda x: torch.einsum("btd,ed", x, torch.zeros(WIDTH, WIDTH)).permute(0, 2, 1)),
    lambda: Function(lambda x: torch.einsum("...d,ed->...e", x, torch.zeros(WIDTH, WIDTH))),
    lambda: Function(lambda x: torch.tensordot(x, torch.zeros(WIDTH, WIDTH), ([2], [0]))),
    lambda: Function(lambda x: torch.tensordot(x, torch.zeros(WIDTH, WIDTH), 1)),
    lambda: Function(lambda x: (torch.zeros(WIDTH, WIDTH) @ x[..., None]).squeeze(-1)),
    lambda: Function(lambda x: x - x.mean(axis=-1, keepdims=True)),
    lambda: Function(lambda x: functional.pad(x, (0, 4))[..., 4:]),
    lambda: Function(lambda x: functional.pad(x, (0, 0, 0, -x.shape[1] % 4))),
    lambda: Function(lambda x: x[:, :, torch.arange(WIDTH).flip(0)]),
    lambda: Function(lambda x: x[..., torch.arange(WIDTH).flip(0)]),
    lambda: Function(lambda x: x[..., None, torch.arange(WIDTH).flip(0)].squeeze(-2)),
    lambda: Function(lambda x: x.index_select(-1, torch.arange(WIDTH).flip(0))),
    lambda: Function(lambda x: x.gather(2, torch.arange(WIDTH).flip(0).expand_as(x))),
    lambda: Function(lambda x: x.gather(-1, x.argmax(-1, keepdim=True))),
    lambda: Function(lambda x: picked(x.flatten(0, 1)).view(*x.shape[:2], 1)),
    lambda: Function(lambda x: x[:, torch.arange(x.shape[1])]),
    lambda: Function(lambda x: x[:, torch.arange(x.shape[1]) + 0]),
    lambda: Function(lambda x: x[:, (0 + torch.arange(x.shape[1])).clamp(0, x.shape[1] - 1)]),
    lambda: Function(lambda x: x[:, torch.arange(x.shape[1]).clamp_min(0).clamp_max(x.shape[1])]),
    lambda: Function(lambda x: kept_aside(x, x.detach().amax(1), x.detach().norm(dim=(1, 2)))),
    lambda: Function(lambda x: kept_aside(x, x.softmax(-1).mean((0, 1)).mul_(2).shape)),
    lambda: Function(lambda x: x.masked_fill(torch.arange(x.shape[1])[:, None] > 2, 0.0)),
    lambda: Function(lambda x: set_at(x.clone(), torch.ones(x.shape[:2], dtype=torch.bool), 0.0)),
    lambda: Function(lambda x: x.cummax(-1).values),
    lambda: Function(lambda x: x.diff(prepend=torch.zeros_like(x[..., :1]))),
    lambda: Function(lambda x: x.unfold(2, 2, 2).mean(-1).repeat(1, 1, 2)),
    lambda: Function(lambda x: torch.conv_tbc(x.transpose(0, 1).contiguous(), x.new_ones(1, WIDTH, WIDTH),
                                              x.new_zeros(WIDTH)).transpose(0, 1)),
    lambda: Function(lambda x: torch.cat([piece.relu() for piece in x.chunk(2, 1)], 1)),
    lambda: Function(lambda x: torch.cat([piece.relu() for piece in x.split(2, 1)], 1)),
]  # fmt: skip


@pytest.mark.parametrize("parts", groups_of(OF_SINGLE_TOKENS))
def test_functions_of_single_tokens_and_attention_are_not_found(parts):
    assert found(lambda: Net(Attention(), *(part() for part in parts))) == {}


class Averaging(nn.Module):
    """A mean over tokens that is kept in a buffer, or an attribute that the next forward reads."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.buffer, self.last = buffer, None

    def forward(self, x):
        last, self.last = self.last, x.detach().mean((0, 1))
        if self.buffer:
            self.average.lerp_(self.last, 0.1)
            return x
        return x if last is None else x - last


@pytest.mark.parametrize("buffer", [True, False])
def test_statistics_that_outlive_the_forward_are_found(buffer):
    assert found(lambda: Net(Attention(), Averaging(buffer=buffer))) == {"layers.1.0": "mean"}


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("llama3", "tiny"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("gpt2", "small"), ("mixtral", "tiny"), ("deepseek", "tiny"))
        ),
    ],
)
def test_the_projects_own_decoders_combine_tokens_by_attention_alone(family, preset):
    source = ModelSource(kind="builtin", target=family, preset=preset, arguments={"n_layers": 2})
    assert found(lambda: build_model(source, ".")) == {}


def test_models_without_positions_are_not_looked_at():
    assert found(lambda: Unplaced(Written())) == {}
