"""Rows routed to experts on other ranks equal those of local experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from legoai.runtime.parallelism.experts import ExpertParallel, limit_capacity
from legoai.specs.models.configs import MixtralConfig
from legoai.specs.models.mixtral import Experts, MoE

CONFIG = MixtralConfig(
    dim=8, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=16, vocab_size=8, max_seq_len=8, n_experts=8, top_k=2
)

ROUTINGS = {
    "even": [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5, 7], [3, 3, 1, 1, 6, 6, 4, 4]],
    "all to one expert": [[5] * 4, [5] * 7, [5], [5, 5]],
    "experts and ranks without rows": [[0, 0, 3], [], [3, 0], [0]],
    "nobody has rows": [[], [], [], []],
}


def experts() -> Experts:
    torch.manual_seed(0)
    module = Experts(CONFIG).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def rows_of(rank: int, routing: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a rank sorted by expert, their numbers, and the gradient of the result."""
    generator = torch.Generator().manual_seed(rank)
    count = len(routing[rank])
    rows, grad = (torch.randn(count, CONFIG.dim, generator=generator, dtype=torch.float64) for _ in range(2))
    numbers = torch.bincount(torch.tensor(routing[rank], dtype=torch.int64), minlength=CONFIG.n_experts)
    return rows.requires_grad_(), numbers, grad


def travel(routing: list[list[int]], ep: int) -> float:
    """The largest difference from experts at home: results, gradients of rows, mean gradients of parameters."""
    mesh = init_device_mesh("cpu", (4 // ep, ep), mesh_dim_names=("same", "ep"))
    rank = torch.distributed.get_rank()
    module = parallelize_module(experts(), mesh["ep"], ExpertParallel())
    rows, numbers, grad = rows_of(rank, routing)
    result = module(rows, numbers)
    result.backward(grad)
    whole = experts()
    expected, [of_rows] = _at_home(whole, rank, routing)
    differences = [result - expected, rows.grad - of_rows]
    group = torch.distributed.get_process_group_ranks(mesh.get_group("ep"))
    for member in group:
        _at_home(whole, member, routing, keep=True)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().shape[0] == CONFIG.n_experts // ep
        differences.append(parameter.grad.full_tensor() - whole.get_parameter(name).grad / ep)
    return max((float(item.detach().abs().max()) for item in differences if item.numel()), default=0.0)


def _at_home(whole: Experts, rank: int, routing: list[list[int]], *, keep: bool = False):
    rows, numbers, grad = rows_of(rank, routing)
    result = whole(rows, numbers)
    if keep:
        result.backward(grad)
        return result.detach(), []
    return result.detach(), torch.autograd.grad(result, [rows], grad)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_routed_to_experts_and_back(name: str, ep: int, gloo):
    assert max(gloo(4)(travel, ROUTINGS[name], ep)) < 1e-12


def capped(routing: list[list[int]], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    module = parallelize_module(experts(), mesh, ExpertParallel(capacity_factor=factor))
    rows, numbers, grad = rows_of(torch.distributed.get_rank(), routing)
    result = module(rows, numbers)
    result.backward(grad)
    return result.detach(), rows.grad


@pytest.mark.parametrize("factor", [0.3, 1.0, 100.0])
def test_rows_beyond_the_capacity_of_a_rank_are_dropped_in_order(factor: float, gloo):
    routing = [[0, 0, 0, 0, 1, 1, 1, 5], [7] * 8, [2, 4, 6], []]
    for rank, (result, grad) in enumerate(gloo(4)(capped, routing, factor)):
        rows, numbers, _ = rows_of(rank, routing)
        capacity = math.ceil(factor * len(rows) / CONFIG.n_experts)
        whole = experts()(rows, numbers).detach()
        seen: dict[int, int] = {}
        for place, expert in enumerate(sorted(routing[rank])):
            seen[expert] = seen.get(expert, 0) + 1
            dropped = seen[expert] > capacity
            expected = torch.zeros_like(whole[place]) if dropped else whole[place]
            torch.testing.assert_close(result[place], expected, rtol=0, atol=1e-12)
            assert bool((grad[place] == 0).all()) == dropped


def test_tokens_over_capacity_are_dropped_from_the_end():
    torch.manual_seed(0)
    layer = MoE(CONFIG).double()
    tokens = torch.randn(1, 1, CONFIG.dim, dtype=torch.float64).expand(1, 12, -1)  # all tokens choose the same experts
    whole = layer(tokens)
    limit_capacity(layer.experts, capacity_factor=1.0)  # 12 tokens, 2 choices, 8 experts: room for 3
    limited = layer(tokens)
    torch.testing.assert_close(limited[:, :3], whole[:, :3])
    assert not limited[:, 3:].any()


def low_precision() -> float:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    module = parallelize_module(experts().bfloat16(), mesh, ExpertParallel())
    rows, numbers, _ = rows_of(torch.distributed.get_rank(), ROUTINGS["even"])
    result = module(rows.detach().bfloat16(), numbers)
    assert result.dtype == torch.bfloat16
    expected = experts().bfloat16()(rows.detach().bfloat16(), numbers)
    return float((result - expected).detach().abs().max())


def test_bf16_grouped_kernel_gives_equal_rows(gloo):
    assert max(gloo(4)(low_precision)) == 0.0
