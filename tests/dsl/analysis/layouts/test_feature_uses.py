"""Parts of the features of a layer that is cut into contiguous pieces, and operations over all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from legoai.dsl.analysis.layouts.propagation import Propagation
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.shard import Colwise, Rowwise
from legoai.specs.models.manifests.described.describe import describe

HEADS, WIDTH = 4, 8
OUT = 3 * HEADS * WIDTH


class Model(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tok = nn.Embedding(64, 32)
        self.up = nn.Linear(32, OUT)
        self.middle = middle
        width = middle(torch.zeros(2, 8, OUT)).shape[-1]
        self.down = nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.middle(self.up(self.tok(tokens))))


def found(middle: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    """Kinds and places of what is reported of a model whose layer is cut."""
    with torch.device("meta"):
        model = Model(middle)
    rules = {"up": PathRule(path="up", treatment=Colwise()), "down": PathRule(path="down", treatment=Rowwise())}
    return [(item.kind, item.path) for item in Propagation(describe(model, "test", shapes=True), rules).run()]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to heads before positions."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def unbound(x: Tensor) -> Tensor:
    return attended(*x.view(*x.shape[:2], 3, -1, WIDTH).permute(2, 0, 3, 1, 4).unbind(0))


def indexed(x: Tensor) -> Tensor:
    qkv = x.view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    return attended(qkv[0], qkv[1], qkv[2])


def unflattened(x: Tensor) -> Tensor:
    return attended(*(part.transpose(1, 2) for part in x.unflatten(-1, (3, -1, WIDTH)).unbind(2)))


def activated(x: Tensor) -> Tensor:
    x = F.silu(x) * 2
    return x[..., : OUT // 2] * x[..., OUT // 2 :]


@pytest.mark.parametrize(
    "middle",
    [
        unbound,
        indexed,
        unflattened,
        activated,
        F.glu,
        lambda x: x.narrow(-1, 0, WIDTH),
        lambda x: x.view(*x.shape[:2], -1, WIDTH)[:, :, :HEADS].flatten(2),
    ],
)
def test_contiguous_parts_of_a_cut_layer_are_reported(middle: Callable[[Tensor], Tensor]) -> None:
    assert found(middle) == [("fused", "")]


def test_gated_unit_as_a_module_is_reported() -> None:
    assert found(nn.GLU()) == [("fused", "middle")]


def heads_first(x: Tensor) -> Tensor:
    return attended(*(part.transpose(1, 2) for part in x.view(*x.shape[:2], HEADS, 3, WIDTH).unbind(3)))


def in_groups(x: Tensor) -> Tensor:
    q, k, v = x.view(*x.shape[:2], 2, HEADS // 2 * 3, WIDTH).split([HEADS // 2, HEADS // 2, HEADS // 2], dim=3)
    return attended(*(part.flatten(2, 3).transpose(1, 2) for part in (q, k, v)))


def halves_of_heads(x: Tensor) -> Tensor:
    one, other = x.view(*x.shape[:2], -1, WIDTH).chunk(2, -1)
    return torch.cat((other.neg(), one), -1).flatten(2)


@pytest.mark.parametrize(
    "middle",
    [
        heads_first,
        in_groups,
        halves_of_heads,
        lambda x: x[..., ::2],
        lambda x: x[:, :4],
        lambda x: x.view(*x.shape[:2], -1, WIDTH).mean(-1),
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.view(*x.shape[:2], -1, WIDTH).softmax(-1).flatten(2),
    ],
)
def test_parts_of_each_head_are_not_reported(middle: Callable[[Tensor], Tensor]) -> None:
    assert found(middle) == []


class Scores(nn.Module):
    """Attention written out, of which one number is learned, or fixed."""

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(())) if learned else 0.5

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], -1, WIDTH).transpose(1, 2)
        scores = (heads @ heads.transpose(-1, -2)) * self.scale
        return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)


def test_learned_number_on_products_of_sharded_heads_is_reported() -> None:
    assert found(Scores(learned=True)) == [("piece", "middle")]
    assert found(Scores(learned=False)) == []


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True)),
        lambda x: x.softmax(dim=-1),
        lambda x: x - x.amax(-1, keepdim=True),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.layer_norm(x, (OUT,)),
        lambda x: x / x.norm(dim=-1, keepdim=True),
        lambda x: x.view(*x.shape[:2], -1, WIDTH).softmax(2).flatten(2),
        lambda x: x.flip(-1),
    ],
)
def test_operation_over_all_features_of_a_cut_layer_is_reported(middle: Callable[[Tensor], Tensor]) -> None:
    assert found(middle) == [("over_shard", "")]
