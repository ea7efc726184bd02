"""The routed feed-forward equals a loop over tokens and their experts."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from legoai.specs.models.families import resolve_config
from legoai.specs.models.mixtral import MoE, grouped_linear


def token_by_token(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """One token after another, one chosen expert after another, in the words of the paper."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        gates = (moe.router.weight @ token).softmax(0)
        best = sorted(range(moe.n_experts), key=lambda e: -gates[e].item())[: moe.top_k]
        total = sum(gates[e] for e in best)
        row = torch.zeros_like(token)
        for e in best:
            hidden = F.silu(moe.experts.w1[e] @ token) * (moe.experts.w3[e] @ token)
            row = row + gates[e] / total * (moe.experts.w2[e] @ hidden)
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_output_and_gradients_equal_a_loop_over_experts(top_k):
    torch.manual_seed(0)
    moe = MoE(resolve_config("mixtral", "tiny", {"dim": 16, "hidden_dim": 24, "top_k": top_k})).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    expected, actual = token_by_token(moe, x), moe(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    direction = torch.randn_like(expected)
    inputs = [x, *moe.parameters()]
    for one, other in zip(
        torch.autograd.grad((actual * direction).sum(), inputs),
        torch.autograd.grad((expected * direction).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_experts_without_tokens_keep_gradients_finite():
    torch.manual_seed(0)
    moe = MoE(resolve_config("mixtral", "tiny", {"top_k": 1})).double()
    x = torch.randn(1, 1, 128, dtype=torch.float64, requires_grad=True)
    moe(x).sum().backward()
    visited = moe.experts.w1.grad.flatten(1).count_nonzero(dim=1) > 0
    assert visited.tolist().count(True) == 1
    assert torch.isfinite(x.grad).all()


def test_bf16_kernel_equals_the_loop():
    torch.manual_seed(0)
    sizes = torch.tensor([3, 0, 5])
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    weight = torch.randn(3, 32, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(
        grouped_linear(x, weight, sizes).float(),
        grouped_linear(x.float(), weight.float(), sizes),
        rtol=1e-2,
        atol=1e-2,
    )
