"""Selective checkpointing and budgets: the kept operators, no more memory than allowed, exact gradients."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime import RecomputeWithin, RunError, keep_outputs
from legoai.runtime.activation import operators
from legoai.runtime.recompute_budget import choose, measure
from legoai.specs.models.random_operators import is_random

DIM, TOKENS = 64, 96
AMOUNTS = [0.0, 0.37, 1.0]


class Block(nn.Module):
    """Attention, a gated feed-forward, dropout before and behind it, and an operator that works in place."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64)
        self.up = nn.Linear(DIM, 4 * DIM, dtype=torch.float64)
        self.down = nn.Linear(4 * DIM, DIM, dtype=torch.float64)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, TOKENS, 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = F.dropout(self.up(x), self.dropout)
        return x + F.dropout(self.down(F.gelu(hidden).neg_()), self.dropout)


def block(dropout: float = 0.0) -> Block:
    torch.manual_seed(0)
    return Block(dropout)


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    x = inputs()
    torch.manual_seed(2)
    module(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def live_bytes() -> int:
    """Bytes of all tensors that this process holds, each storage once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def held(module: nn.Module) -> int:
    """Bytes that stay from a forward until its backward, the output not counted."""
    x = inputs()
    output = module(x)
    del output
    before = live_bytes()
    output = module(x)
    kept = live_bytes() - before - output.untyped_storage().nbytes()
    output.sum().backward()
    return kept


@pytest.mark.parametrize("names", [(), ("attention",), ("matmul",), ("alternate_matmul", "aten.native_layer_norm")])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_without_checkpointing(names: tuple[str, ...], dropout: float):
    plain = gradients(block(dropout))
    kept = gradients(checkpoint_wrapper(block(dropout), context_fn=keep_outputs(*names)))
    assert_close(kept, plain, rtol=0, atol=0)


@pytest.mark.parametrize("by", ["greedy", "knapsack"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_gradients_under_a_budget_are_those_without_checkpointing(amount: float, by: str, dropout: float):
    plain = gradients(block(dropout))
    kept = gradients(checkpoint_wrapper(block(dropout), checkpoint_fn=RecomputeWithin(amount, by=by)))
    assert_close(kept, plain, rtol=0, atol=0)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """What is there before is left out of what the garbage collector looks through for tensors."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("by", ["greedy", "knapsack"])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_share_of_the_memory_is_kept_to_within_one_operator(amount: float, by: str):
    full = held(checkpoint_wrapper(block()))
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # Python then sees what is saved
        everything = held(block())
    kept = held(checkpoint_wrapper(block(), checkpoint_fn=RecomputeWithin(amount, by=by)))
    measured = measure(block(), inputs())
    largest = max(item.size for item in measured.operators)
    random_state = torch.get_rng_state().nbytes
    assert measured.total == everything
    assert full == random_state
    assert kept - full <= amount * (everything - (full - random_state))
    keepable = sum(item.size for item in measured.operators)
    assert kept - full >= min(amount * everything, keepable) - largest


@pytest.mark.usefixtures("small_heap")
def test_bytes_are_kept_as_bytes():
    budget = 100_000
    kept = held(checkpoint_wrapper(block(), checkpoint_fn=RecomputeWithin(budget, by="knapsack")))
    assert budget // 2 < kept - torch.get_rng_state().nbytes <= budget


def test_a_larger_budget_recomputes_less():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.count += operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            return operator(*args, **(kwargs or {}))

    counts = []
    for amount in (0.0, 0.5, 1.0):
        module = checkpoint_wrapper(block(), checkpoint_fn=RecomputeWithin(amount, by="knapsack"))
        gradients(module)
        with Products() as products:
            gradients(module)
        counts.append(products.count)
    assert counts[0] > counts[1] > counts[2]


def test_what_is_changed_in_place_is_not_kept():
    calls = {item.call[0].name() for item in measure(block(), inputs()).operators}
    assert "aten::gelu" not in calls
    assert {"aten::addmm", "aten::native_layer_norm", "aten::_scaled_dot_product_flash_attention_for_cpu"} <= calls


def test_views_and_what_nothing_needs_again_are_no_choice():
    calls = [item.call for item in measure(block(), inputs()).operators]
    names = [operator.name() for operator, _ in calls]
    assert not {"aten::view", "aten::t", "aten::permute", "aten::transpose.int"} & set(names)
    assert names.count("aten::addmm") == 2  # of three: recomputation ends before the last


def test_measuring_leaves_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure(block(0.3), x := inputs())
    assert x.grad is None
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_is_random_only_where_it_drops():
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not is_random(flash, (None, None, None), {})
    assert not is_random(flash, (None, None, None, 0.0), {})
    assert is_random(flash, (None, None, None, 0.1), {})
    assert is_random(flash, (None, None, None), {"dropout_p": 0.1})
    assert is_random(torch.ops.aten.native_dropout.default, (), {})
    assert not is_random(torch.ops.aten.mm.default, (), {})


def test_names_are_found_with_and_without_their_overloads():
    assert operators("aten.mm.default") == {torch.ops.aten.mm.default}
    assert torch.ops.aten.mm.default in operators("aten.mm")
    assert torch.ops.aten.mm.out not in operators("aten.mm")


@pytest.mark.parametrize("name", ["aten.nm", "aten.mm.defualt", "aten", "nowhere.mm", "aten.mm.default.more", ""])
def test_a_name_of_no_operator_is_said_at_the_start(name: str):
    with pytest.raises(RunError, match=rf'RUN043.*no operator "{name}"'):
        keep_outputs("matmul", name)


@pytest.mark.parametrize("name", ["aten.relu_", "aten.bernoulli_.float", "aten.native_dropout", "aten.rand_like"])
def test_what_changes_its_input_or_is_random_cannot_be_kept(name: str):
    with pytest.raises(RunError, match=r"RUN043.*(in place|random numbers), and what it computes cannot be kept"):
        keep_outputs(name)


@pytest.mark.parametrize("seed", range(20))
def test_the_knapsack_is_the_best_choice_and_no_worse_than_the_greedy_one(seed: int):
    draw = random.Random(seed)
    weights = tuple((draw.randrange(1, 60), float(draw.randrange(1, 100))) for _ in range(10))
    budget = draw.randrange(1, 300)

    def worth(places) -> float:
        return sum(weights[place][1] for place in places)

    def size(places) -> int:
        return sum(weights[place][0] for place in places)

    subsets = itertools.chain.from_iterable(itertools.combinations(range(10), count) for count in range(11))
    best = max(worth(places) for places in subsets if size(places) <= budget)
    greedy, knapsack = (choose(weights, budget, by=by) for by in ("greedy", "knapsack"))
    assert size(greedy) <= budget
    assert size(knapsack) <= budget
    assert worth(greedy) <= worth(knapsack) == best


def test_a_large_knapsack_keeps_to_its_budget():
    draw = random.Random(0)
    weights = tuple((draw.randrange(1, 2**28), draw.random() * 1e12) for _ in range(150))
    budget = sum(size for size, _ in weights) // 3
    taken = choose(weights, budget, by="knapsack")
    assert sum(weights[place][0] for place in taken) <= budget
    greedy = choose(weights, budget, by="greedy")
    assert sum(weights[place][1] for place in taken) >= sum(weights[place][1] for place in greedy)


def test_evaluation_neither_measures_nor_checkpoints():
    module = RecomputeWithin(0.5, by="greedy")
    with torch.no_grad():
        checkpoint_wrapper(block(), checkpoint_fn=module)(inputs())
    assert module.kept is None
