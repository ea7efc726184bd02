"""Budgets of compiled modules: what is saved, that gradients stay, and where torch would compute wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from legoai.runtime import compile_within


class Block(nn.Module):
    """A feed-forward module of several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + functional.silu(self.down(hidden))


def trained(*backends: object) -> tuple[int, list[torch.Tensor], int]:
    """Bytes that a stack of blocks saves, its gradients, and the graphs that were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    blocks = [Block() for _ in backends]
    for block, backend in zip(blocks, backends, strict=True):
        if backend is not None:
            block.compile(backend=backend, fullgraph=True)
    x = torch.randn(16, 32, requires_grad=True)
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = x
        for block in blocks:
            out = block(out)
    out.square().sum().backward()
    gradients = [item.grad for block in blocks for item in block.parameters()]
    return sum(saved), [x.grad, *gradients], torch._dynamo.utils.counters["stats"]["unique_graphs"]


def within(amount: float, by: str = "knapsack") -> object:
    return compile_within(amount, by=by, backend="aot_eager")


def test_smaller_budgets_save_less_and_gradients_stay():
    _, eager, _ = trained(None)
    sizes = []
    for backend in (within(1.0), within(0.6), within(0.3, "greedy"), within(0.0)):
        size, gradients, _ = trained(backend)
        sizes.append(size)
        torch.testing.assert_close(gradients, eager)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[3]
    assert sizes[0] == trained("aot_eager")[0]


def test_blocks_of_one_budget_share_a_graph_and_others_do_not():
    alone, _, graphs = trained(within(0.0), within(0.0), within(0.0))
    assert graphs == 1
    mixed, _, graphs = trained(within(0.0), within(1.0), within(0.0))
    assert graphs == 2
    assert mixed > alone


class Dropping(nn.Module):
    """Drops elements between functions whose derivatives nothing but these elements decide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x.sin(), 0.5).sin()


def test_blocks_may_have_more_budgets_than_dynamo_compiles_one_function_for():
    backends = [within(place / 10) for place in range(5)]
    with torch._dynamo.config.patch(recompile_limit=4):
        _, gradients, graphs = trained(*backends)
    assert graphs == len(backends)
    torch.testing.assert_close(gradients, trained(*[None] * len(backends))[1])


@pytest.mark.parametrize(("amount", "equal"), [(1.0, True), (0.0, False)])
def test_torch_draws_other_numbers_where_it_recomputes_dropout(amount: float, equal: bool):
    """The reason for LP639: elements that forward dropped have gradients."""
    torch._dynamo.reset()
    module = Dropping()
    module.compile(backend=within(amount), fullgraph=True)
    x = torch.rand(64, 64) + 0.5
    x.requires_grad_()
    out = module(x)
    out.sum().backward()
    assert torch.equal(out != 0, x.grad != 0) is equal
