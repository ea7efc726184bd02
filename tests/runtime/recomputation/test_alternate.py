"""`alternate_matmul` on the products of a mixture's block: what is counted, kept and computed again."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime import keep_outputs
from legoai.runtime.recomputation.policies import operators
from legoai.specs.models.configs import DeepSeekConfig
from legoai.specs.models.deepseek import MoE
from legoai.specs.operators import KEPT, LAYER_PRODUCTS, PRODUCTS

DIM, HIDDEN = 32, 16
CONFIG = DeepSeekConfig(
    dim=DIM, n_layers=2, n_dense_layers=1, n_heads=2, q_lora_rank=0, kv_lora_rank=8, nope_head_dim=8, rope_head_dim=8,
    v_head_dim=8, dense_hidden_dim=32, hidden_dim=HIDDEN, n_experts=4, n_shared_experts=1, top_k=2, vocab_size=64,
    max_seq_len=64,
)  # fmt: skip
PRODUCT_NAMES = ("mm", "addmm", "bmm", "_grouped_mm")


class Batched(nn.Module):
    """A product of two matrices, one of batches, and another of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.weight = nn.Parameter(torch.randn(4, DIM, DIM) / DIM)
        self.second = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.bmm(self.first(x).sigmoid(), self.weight).sigmoid()).sigmoid()


class Biased(nn.Sequential):
    """Four linear layers with a bias."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid()) for _ in range(4)))


class Products(TorchDispatchMode):
    """Counts products by their operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCT_NAMES:
            self.counts[name] += 1
        return out


def trained(module: nn.Module, x: torch.Tensor) -> tuple[Counter[str], list[torch.Tensor]]:
    """Products of one forward and backward, and the gradients."""
    x = x.clone().requires_grad_()
    with Products() as products:
        module(x).float().square().sum().backward()
    return products.counts, [x.grad, *(parameter.grad for parameter in module.parameters())]


def again(module: type[nn.Module] | None, keep: tuple[str, ...], dtype: torch.dtype) -> Counter[str]:
    """Products that are computed again where a block keeps some outputs; its gradients are those without."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return (MoE(CONFIG) if module is None else module()).to(dtype)

    torch.manual_seed(1)
    x = torch.randn(4, 6, DIM, dtype=dtype)
    contexts = {"context_fn": keep_outputs(*keep)} if keep else {}
    # To the end, so that the last product counts as the others do.
    counts, found = trained(checkpoint_wrapper(built(), early_stop=False, **contexts), x)
    plain_counts, plain = trained(built(), x)
    assert_close(found, plain, rtol=0, atol=0)
    return counts - plain_counts


def test_grouped_products_are_recomputed_and_not_counted():
    """Router, w1, w3 and w2 of the shared expert: the first and third are kept, whatever lies between them."""
    assert again(None, (), torch.bfloat16) == {"mm": 4, "_grouped_mm": 3}
    for names in (("alternate_matmul",), ("alternate_matmul", "aten.topk.default")):
        assert again(None, names, torch.bfloat16) == {"mm": 2, "_grouped_mm": 3}
    assert again(None, ("matmul",), torch.bfloat16) == {}


def test_batched_products_are_recomputed_and_not_counted():
    assert again(Batched, ("alternate_matmul",), torch.float32) == {"mm": 1, "bmm": 1}
    assert again(Batched, ("matmul",), torch.float32) == {}


def test_words_name_operators_of_torch():
    assert set(LAYER_PRODUCTS) < set(PRODUCTS)
    for name in {name for names in KEPT.values() for name in names} - {"aten.linear"}:
        assert operators(name), name


def test_linear_layers_with_a_bias_are_counted():
    assert again(Biased, ("alternate_matmul",), torch.float32) == {"addmm": 2}
    assert again(Biased, (), torch.float32) == {"addmm": 4}
