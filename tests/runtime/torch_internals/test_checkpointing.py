"""Recomputation under selective checkpointing: allowed and forbidden differences from forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from legoai.runtime.torch_internals.checkpointing import recompute_freely

KEPT = torch.ops.aten.mm.default


def contexts(*, freely: bool) -> Callable[[], tuple]:
    def policy(_, operator, *_args, **_kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator is KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    def both() -> tuple:
        forward, recomputation = create_selective_checkpoint_contexts(policy)
        return forward, recompute_freely(recomputation, lambda operator: operator is KEPT) if freely else recomputation

    return both


def gradient(differently: Callable[[torch.Tensor], torch.Tensor], *, freely: bool = True, backwards: int = 1):
    """The gradient of a product that is kept and a sine that is not, where recomputation does something else too."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    calls = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return ((differently(x) if calls > 1 else x) @ x).sin().exp()

    out = checkpoint(function, x, use_reentrant=False, context_fn=contexts(freely=freely))
    for _ in range(backwards):
        out.sum().backward(retain_graph=backwards > 1)
    return x.grad


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def another_operator(x: torch.Tensor) -> torch.Tensor:
    x.detach().cos()
    return x


def one_invocation_more(x: torch.Tensor) -> torch.Tensor:
    x.detach().sin()
    x.detach().exp()
    return x


@pytest.mark.parametrize("differently", [another_operator, one_invocation_more])
def test_operators_that_are_not_kept_may_run_in_recomputation_alone(differently):
    torch.testing.assert_close(gradient(differently), gradient(same, freely=False), rtol=0, atol=0)


def test_torch_refuses_them_by_the_words_that_are_looked_for():
    if torch.__version__.startswith("2.12"):
        assert gradient(another_operator, freely=False) is not None  # asks the policy, and computes
        return
    with pytest.raises(RuntimeError, match="encountered during backward but not found in storage"):
        gradient(another_operator, freely=False)


def test_a_kept_operator_that_only_recomputation_runs_is_an_error():
    """The first product of recomputation gets the output that was kept; for the second there is none."""

    def one_product_more(x: torch.Tensor) -> torch.Tensor:
        (x.detach() @ x.detach()).sum()
        return x

    with pytest.raises(RuntimeError, match=r"not found in storage|backward an extra time"):
        gradient(one_product_more)


def test_what_is_kept_can_be_read_once():
    with pytest.raises(RuntimeError, match="backward an extra time"):
        gradient(same, backwards=2)


def test_higher_order_operators_are_recomputed():
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    forward, recomputation = contexts(freely=True)()
    with forward:
        once = flex_attention(q, k, v)
    with recomputation:
        torch.testing.assert_close(flex_attention(q, k, v), once, rtol=0, atol=0)
