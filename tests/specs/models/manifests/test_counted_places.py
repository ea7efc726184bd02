"""Models that count places of tokens themselves are told from those that compute with given positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from legoai.specs.models.manifests.counted_places import CountedPlaces
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.torch_internals import meta_device

WIDTH, HEADS, LONGEST = 32, 4, 64
SIZE = WIDTH // HEADS


def rotated(x, angles):
    first, second = x[..., 0::2], x[..., 1::2]
    cosines, sines = angles.cos(), angles.sin()
    return torch.stack((first * cosines - second * sines, first * sines + second * cosines), -1).flatten(-2)


class Attention(nn.Module):
    """Causal attention with rotary angles."""

    def __init__(self, angles: Callable[[Any, Any, Any], Any] | None) -> None:
        super().__init__()
        self.qkv, self.out, self.angles = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), angles
        self.register_buffer("table", torch.zeros(LONGEST, SIZE // 2), persistent=False)
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(0, SIZE, 2) / SIZE), persistent=False)

    def forward(self, x, positions):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.angles is not None:
            angles = self.angles(self, q, positions)
            q, k = rotated(q, angles), rotated(k, angles)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, angles: Callable[[Any, Any, Any], Any] | None) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(angles)

    def forward(self, x, positions):
        return x + self.attention(self.norm(x), positions)


class Net(nn.Module):
    """Tokens to logits, where `placed` adds places to embedded tokens."""

    def __init__(self, placed: Callable[[Any, Any, Any], Any] | None, angles: Any = None) -> None:
        super().__init__()
        self.embed, self.head, self.placed = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256), placed
        self.wpe = nn.Embedding(LONGEST, WIDTH)
        self.register_buffer("sines", torch.zeros(LONGEST, WIDTH), persistent=False)
        self.layers = nn.ModuleList([Block(angles)])

    def forward(self, tokens, positions=None):
        x = self.embed(tokens)
        if self.placed is not None:
            x = self.placed(self, x, positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


def learned(net, x, positions):
    """Learned positions, with a default."""
    return x + net.wpe(torch.arange(x.shape[1], device=x.device) if positions is None else positions)


def looked_up(net, x, positions):
    return x + net.sines[positions] if positions is not None else x


def default_beside(net, x, positions):
    """A default that is made in any case."""
    own = torch.arange(x.shape[1], device=x.device)
    return x + net.wpe(own if positions is None else positions)


def found_by_own_place(net, x, positions):
    """Rows that are taken by an index that counts all of them, as a router's choices are."""
    rows = x.flatten(0, 1)
    return learned(net, rows[torch.arange(len(rows), device=x.device)].view_as(x), positions)


def evenly(net, x, positions):
    """Tensors as long as the sequence that tell no place."""
    ones = torch.ones(x.shape[1], 1, device=x.device)
    of_first = net.wpe.weight[0].expand(x.shape[1], -1) + net.wpe(torch.zeros_like(ones[:, 0], dtype=torch.int64))
    return learned(net, x * ones + of_first, positions)


def logged(net, x, positions):
    """What the result does not depend on."""
    _ = (x * torch.arange(x.shape[1], device=x.device)[:, None]).detach()
    return learned(net, x, positions)


def of_positions(attention, q, positions):
    own = torch.arange(q.shape[2], device=q.device) if positions is None else positions
    return own[:, None] * attention.frequencies


def of_table(attention, q, positions):
    return attention.table[: q.shape[2]] if positions is None else attention.table[positions]


def outer(attention, q, positions):
    own = torch.arange(q.shape[2], device=q.device) if positions is None else positions
    return torch.outer(own.to(q.dtype), attention.frequencies).to(q)


def counted(attention, q, positions):
    return torch.arange(q.shape[2], device=q.device)[:, None] * attention.frequencies


def summed(attention, q, positions):
    return (torch.ones(q.shape[2], device=q.device).cumsum(0) - 1)[:, None] * attention.frequencies


def cut(attention, q, positions):
    return attention.table[: q.shape[2]]


def narrowed(attention, q, positions):
    return attention.table.narrow(0, 0, q.shape[2])


def written_to(attention, q, positions):
    angles = torch.zeros(q.shape[2], SIZE // 2, device=q.device)
    angles[:] = torch.linspace(0, 1, q.shape[2], device=q.device)[:, None]
    return angles


def ignored(net, x, positions):
    return x + net.wpe(torch.arange(x.shape[1], device=x.device))


def cut_parameter(net, x, positions):
    return x + net.wpe.weight[: x.shape[1]]


def token_by_token(net, x, positions):
    return torch.stack([token + net.wpe.weight[place] for place, token in enumerate(x.unbind(1))], 1)


def described(make: Callable[[], nn.Module]) -> dict[str, CountedPlaces]:
    with meta_device():
        net = make()
    manifest = describe(net, "net", shapes=True)
    assert manifest.flow_error is None
    return {path: module.places for path, module in manifest.modules.items()}


RIGHT = [
    (learned, None), (looked_up, None), (default_beside, None), (found_by_own_place, None), (evenly, None),
    (logged, None), (None, of_positions), (learned, of_table), (None, outer), (None, None),
]  # fmt: skip


@pytest.mark.parametrize(("placed", "angles"), RIGHT)
def test_models_that_compute_with_positions_count_nothing(placed: Any, angles: Any) -> None:
    found = described(lambda: Net(placed, angles))
    assert not [path for path, places in found.items() if places.by or places.ignores_positions]


@pytest.mark.parametrize(
    ("placed", "angles", "path", "by"),
    [
        (learned, counted, "layers.0.attention", "`arange`"),
        (learned, summed, "layers.0.attention", "`cumsum`"),
        (learned, cut, "layers.0.attention", "a part of `table`"),
        (learned, narrowed, "layers.0.attention", "a part of `table`"),
        (learned, written_to, "layers.0.attention", "`linspace`"),
        (ignored, of_positions, "", "`arange`"),
        (ignored, None, "", "`arange`"),
        (cut_parameter, of_positions, "", "a part of `weight`"),
    ],
)
def test_places_that_meet_activations_are_found(placed: Any, angles: Any, path: str, by: str) -> None:
    found = described(lambda: Net(placed, angles))
    assert found[path].by == by
    assert not found[""].ignores_positions


def test_unused_positions_are_found_where_forward_cannot_be_compared_at_two_lengths() -> None:
    assert described(lambda: Net(token_by_token))[""].ignores_positions


class OfOneSize(Net):
    """A model whose table has the length of its sequences."""

    def example_inputs(self):
        return (torch.zeros(2, LONGEST, dtype=torch.int64),)


def test_unused_positions_are_found_in_a_model_of_one_size() -> None:
    assert described(lambda: OfOneSize(lambda net, x, _: x + net.sines))[""].ignores_positions
    assert not described(lambda: OfOneSize(looked_up))[""].ignores_positions


class WithPositions(Net):
    """A model whose example has positions."""

    def example_inputs(self):
        return torch.zeros(2, 8, dtype=torch.int64), torch.arange(8)


def test_positions_of_an_example_are_those_that_the_model_is_given() -> None:
    assert not described(lambda: WithPositions(learned))[""].by
    assert described(lambda: WithPositions(ignored))[""].by == "`arange`"


def test_steps_of_a_flow_that_tell_places_are_noted_with_their_dims() -> None:
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(LONGEST, WIDTH))

        def forward(self, x):
            return x + self.table[: x.shape[1]]

    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places, self.head = nn.Embedding(256, WIDTH), Table(), nn.Linear(WIDTH, 256)

        def forward(self, tokens):
            return self.head(self.places(self.embed(tokens)))

    with meta_device():
        manifest = describe(Embedded(), "net", shapes=True)
    flow = manifest.modules["places"].flow
    assert {flow[step].name: dims for step, dims in manifest.modules["places"].places.steps} == {"getitem": (-2,)}
    assert not manifest.modules[""].places.steps
