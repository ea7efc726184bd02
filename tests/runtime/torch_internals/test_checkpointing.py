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
    """Gradient of a saved product and a recomputed sine, with other operators in recomputation."""
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
def test_unsaved_operators_may_differ_in_recomputation(differently):
    torch.testing.assert_close(gradient(differently), gradient(same, freely=False), rtol=0, atol=0)


def test_torch_error_text_for_other_operators_is_known():
    if torch.__version__.startswith("2.12"):
        assert gradient(another_operator, freely=False) is not None  # asks the policy, and computes
        return
    with pytest.raises(RuntimeError, match="encountered during backward but not found in storage"):
        gradient(another_operator, freely=False)


def test_saved_operator_run_only_in_recomputation_is_an_error():
    """The first product of recomputation gets the saved output; the second has none."""

    def one_product_more(x: torch.Tensor) -> torch.Tensor:
        (x.detach() @ x.detach()).sum()
        return x

    with pytest.raises(RuntimeError, match=r"not found in storage|backward an extra time"):
        gradient(one_product_more)


def test_saved_outputs_can_be_read_once():
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
