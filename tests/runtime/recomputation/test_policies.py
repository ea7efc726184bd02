"""Selective checkpointing and budgets: the saved operators, no more memory than allowed, exact gradients."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime import RecomputeWithin, RunError, keep_outputs
from legoai.runtime.recomputation.budget import measure
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.specs.models.random_operators import is_random
from support.marks import NEEDS_SOLVER

DIM, TOKENS = 64, 96
AMOUNTS = [0.0, 0.37, 1.0]
METHODS = ["greedy", "knapsack", pytest.param("ilp", marks=NEEDS_SOLVER)]


class Block(nn.Module):
    """Attention, a gated feed-forward, dropout before and after it, and an in-place operator."""

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
def test_gradients_equal_those_without_checkpointing(names: tuple[str, ...], dropout: float):
    plain = gradients(block(dropout))
    kept = gradients(checkpoint_wrapper(block(dropout), context_fn=keep_outputs(*names)))
    assert_close(kept, plain, rtol=0, atol=0)


class Changing(nn.Module):
    """Changes the output of its first layer in place."""

    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, bias: bool) -> None:
        super().__init__()
        self.change = change
        self.first = nn.Linear(DIM, DIM, bias=bias, dtype=torch.float64)
        self.second = nn.Linear(DIM, DIM, bias=bias, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.change(self.first(x), x)))


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda hidden, x: hidden.add_(x),
    "silu": lambda hidden, x: F.silu(hidden, inplace=True),
    "dropout": lambda hidden, x: F.dropout(hidden, 0.5, inplace=True),
    "view": lambda hidden, x: hidden.view(-1, DIM).neg_().view_as(hidden),
    "part": lambda hidden, x: hidden.index_fill_(-1, torch.tensor([3]), 2.0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_outputs_changed_in_place_are_recomputed(change: str, bias: bool):
    def built() -> nn.Module:
        torch.manual_seed(0)
        return Changing(CHANGES[change], bias=bias)

    plain = gradients(built())
    for names in (("matmul",), ("alternate_matmul",)):
        assert_close(gradients(checkpoint_wrapper(built(), context_fn=keep_outputs(*names))), plain, rtol=0, atol=0)


def test_saved_outputs_are_freed_without_the_garbage_collector():
    forward, recomputation = keep_outputs("matmul")()
    with forward:
        torch.ones(2, 2) @ torch.ones(2, 2)
    left = weakref.ref(forward)
    del forward, recomputation
    assert left() is None


class Noisy(nn.Module):
    """Ends with an operator whose noise autograd saves before it is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.layer(x), 0.2, 0.9, training=True)


@pytest.fixture
def _new_memory_has_no_values() -> Iterator[None]:
    """Memory that is not written holds NaN, not what stood there by chance."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_new_memory_has_no_values")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("way", ["full", "selective", "budget"])
def test_noise_that_is_drawn_last_needs_recomputation_to_the_end(way: str, early: bool):
    """The reason for `early_stop = False`: torch stops as soon as the noise is there, before it has its values."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return Noisy()

    ways = {
        "selective": {"context_fn": keep_outputs("matmul")},
        "budget": {"checkpoint_fn": RecomputeWithin(0.5, by="greedy")},
    }
    found = gradients(checkpoint_wrapper(built(), early_stop=early, **ways.get(way, {})))
    plain = gradients(built())
    assert all(map(torch.equal, found, plain)) is not early


def test_only_outputs_changed_in_place_are_recomputed():
    calls = Counter[OpOverload]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[func] += 1
            return func(*args, **kwargs or {})

    module = checkpoint_wrapper(Changing(CHANGES["add"], bias=True), context_fn=keep_outputs("matmul"))
    out = module(inputs())
    with Counting():
        out.sum().backward()
    assert calls[torch.ops.aten.addmm.default] == 1


@pytest.mark.parametrize("by", METHODS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_gradients_under_a_budget_equal_those_without_checkpointing(amount: float, by: str, dropout: float):
    plain = gradients(block(dropout))
    kept = gradients(checkpoint_wrapper(block(dropout), checkpoint_fn=RecomputeWithin(amount, by=by)))
    assert_close(kept, plain, rtol=0, atol=0)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_budget_under_autocast_counts_equal_calls_in_every_forward(amount: float):
    def steps(module: nn.Module) -> list[torch.Tensor]:
        module, x = module.float(), inputs().float()
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = module(module(x)).square().sum()  # whose second forward finds the casts of the first
            assert torch.is_autocast_cache_enabled()
            loss.backward()
        return [parameter.grad for parameter in module.parameters()]

    kept = checkpoint_wrapper(block(), checkpoint_fn=RecomputeWithin(amount, by="knapsack"))
    assert_close(steps(kept), steps(block()), rtol=1e-2, atol=1e-2)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Excludes existing objects from the garbage collector, which the tests search for tensors."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("by", METHODS)
@pytest.mark.parametrize("amount", AMOUNTS)
def test_fractional_budget_is_met_within_one_operator(amount: float, by: str):
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
def test_byte_budget_is_respected():
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


def test_tensors_changed_in_place_are_not_saved():
    calls = {item.call[0].name() for item in measure(block(), inputs()).operators}
    assert "aten::gelu" not in calls
    assert {"aten::addmm", "aten::native_layer_norm", "aten::_scaled_dot_product_flash_attention_for_cpu"} <= calls


def test_views_and_unneeded_outputs_are_no_candidates():
    calls = [item.call for item in measure(block(), inputs()).operators]
    names = [operator.name() for operator, _ in calls]
    assert not {"aten::view", "aten::t", "aten::permute", "aten::transpose.int"} & set(names)
    assert names.count("aten::addmm") == 2  # of three: recomputation ends before the last


class Dropped(nn.Module):
    """Two layers and two dropouts, by the operator that GPUs drop with; `in_place` adds a random operator in place."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(2))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.native_dropout(self.up(x), 0.3, True)[0]
        if self.in_place:
            x = x * torch.empty_like(x).bernoulli_(0.5)
        return torch.native_dropout(self.down(F.gelu(x)), 0.3, True)[0].sin()


def kept_calls(module: RecomputeWithin) -> list[str]:
    return sorted(operator.name().partition("::")[2] for operator, _ in module.kept or ())


@pytest.mark.parametrize("by", METHODS)
@pytest.mark.parametrize("amount", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_random_operators_are_saved_together_or_not_at_all(amount: float, by: str):
    chosen = RecomputeWithin(amount, by=by)
    kept = gradients(checkpoint_wrapper(Dropped(), checkpoint_fn=chosen))
    assert_close(kept, gradients(Dropped()), rtol=0, atol=0)
    assert kept_calls(chosen).count("native_dropout") in (0, 2)


def test_random_operators_are_saved_if_the_budget_allows():
    chosen = RecomputeWithin(2**30, by="knapsack")
    gradients(checkpoint_wrapper(Dropped(), checkpoint_fn=chosen))
    assert kept_calls(chosen).count("native_dropout") == 2


def test_no_random_operator_is_saved_if_one_cannot_be():
    chosen = RecomputeWithin(2**30, by="knapsack")
    kept = gradients(checkpoint_wrapper(Dropped(in_place=True), checkpoint_fn=chosen))
    assert_close(kept, gradients(Dropped(in_place=True)), rtol=0, atol=0)
    assert kept_calls(chosen).count("native_dropout") == 0
    assert "addmm" in kept_calls(chosen)


@pytest.mark.parametrize("by", METHODS)
def test_operators_saved_in_a_real_run_equal_the_policy(by: str):
    class Computed(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.counts[operator.name().partition("::")[2]] += 1
            return operator(*args, **(kwargs or {}))

    def computed(module: nn.Module) -> Counter[str]:
        gradients(module)
        with Computed() as seen:
            gradients(module)
        return seen.counts

    nothing, chosen = RecomputeWithin(0.0, by=by), RecomputeWithin(0.5, by=by)
    without = computed(checkpoint_wrapper(block(), checkpoint_fn=nothing))
    within = computed(checkpoint_wrapper(block(), checkpoint_fn=chosen))
    assert nothing.kept == frozenset()
    assert len(kept_calls(chosen)) > 1
    spared = without - within
    assert {name: spared[name] for name in spared if name != "detach"} == Counter(kept_calls(chosen))


def test_missing_solver_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("legoai.runtime.linear_program.find_spec", lambda _: None)
    with pytest.raises(RunError, match=r"RUN046.*by = ilp.*\n.*legoai\[solvers\]"):
        RecomputeWithin(0.5, by="ilp")
    RecomputeWithin(0.5, by="knapsack")


def test_measuring_preserves_the_rng_state():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure(block(0.3), x := inputs())
    assert x.grad is None
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_measuring_leaves_buffers_as_they_are():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(DIM, dtype=torch.float64))
            self.register_buffer("scale", torch.ones(DIM, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            return self.inner(x) * self.scale

    module = Counts()
    mean = module.mean
    measure(module, inputs())
    assert module.calls == 0 and module.mean is mean
    assert module.scale._version == 0, "a buffer that stays the same is not copied"
    kept = checkpoint_wrapper(Counts(), checkpoint_fn=RecomputeWithin(2**30, by="knapsack"))
    kept(inputs())
    assert kept.calls == 1


@pytest.mark.slow
def test_measuring_leaks_no_memory():
    module, x = block(), inputs()
    before = live_bytes()
    measure(module, x)
    assert live_bytes() == before


def test_attention_is_random_only_with_dropout():
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not is_random(flash, (None, None, None), {})
    assert not is_random(flash, (None, None, None, 0.0), {})
    assert is_random(flash, (None, None, None, 0.1), {})
    assert is_random(flash, (None, None, None), {"dropout_p": 0.1})
    assert is_random(torch.ops.aten.native_dropout.default, (), {})
    assert not is_random(torch.ops.aten.mm.default, (), {})


def test_evaluation_neither_measures_nor_checkpoints():
    module = RecomputeWithin(0.5, by="greedy")
    with torch.no_grad():
        checkpoint_wrapper(block(), checkpoint_fn=module)(inputs())
    assert module.kept is None
