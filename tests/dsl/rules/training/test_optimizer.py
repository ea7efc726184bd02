"""Rules about updates agree with `torch.optim`."""

from __future__ import annotations

import pytest
import torch

from support.texts.rule_plans import codes, message

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_learning_rate_zero_is_reported() -> None:
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    assert "LP681" in codes("optimizer adamw(lr = 0.0)")
    assert "LP681" not in codes("optimizer adamw(lr = 1e-5)")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("", "nothing is learned"),
        ("{ ** = group(lr_scale = 2) }", "nothing is learned"),
        ("{ norm = group(lr = 1e-3) }", "learn nothing"),
    ],
)
def test_parameters_with_a_rate_of_their_own_learn_beside_a_rate_of_zero(rules: str, said: str) -> None:
    assert said in message(f"optimizer adamw(lr = 0.0) {rules}", "LP681")
    assert "LP681" not in codes("optimizer adamw(lr = 0.0) { ** = group(lr = 1e-3) }")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_refused_where_pytorch_refuses_it(momentum: float, nesterov: bool) -> None:
    try:
        torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1, momentum=momentum, nesterov=nesterov)
        legal = True
    except ValueError:
        legal = False
    plan = f"optimizer sgd(lr = 0.1, momentum = {momentum}, nesterov = {'true' if nesterov else 'false'})"
    assert ("LP682" not in codes(plan)) is legal


@pytest.mark.parametrize("master", DTYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-8, 2.9e-8, 3.1e-8, 1e-6])
def test_epsilon_that_rounds_to_zero_is_reported(master: str, eps: float) -> None:
    vanishes = bool(torch.tensor(eps, dtype=torch.float64).to(DTYPES[master]) == 0)
    assert ("LP683" in codes(f"precision (master = {master})\noptimizer adam(eps = {eps})")) is vanishes


def test_pytorch_divides_zero_by_zero_where_epsilon_vanishes() -> None:
    def after_update(dtype: torch.dtype) -> torch.Tensor:
        parameter = torch.zeros(2, dtype=dtype, requires_grad=True)
        optimizer = torch.optim.AdamW([parameter], eps=1e-8, foreach=True)
        parameter.grad = torch.zeros(2, dtype=dtype)
        optimizer.step()
        return parameter.detach()

    assert after_update(torch.float16).isnan().all()
    assert not after_update(torch.bfloat16).isnan().any()


@pytest.mark.parametrize("state", ["int8", "fp8", "int4"])
def test_low_precision_optimizer_state_is_refused(state: str) -> None:
    assert message(f"optimizer adamw(lr = 3e-4, state = {state})", "LP010").startswith(
        f"`state = {state}` is not lowered"
    )
    assert "LP010" not in codes("optimizer adamw(lr = 3e-4)")


@pytest.mark.parametrize(
    ("optimizer", "is_refused"),
    [
        ("adamw(lr = 0.01)", True),
        ("adam(lr = 0.01)", True),
        ("adamw(lr = 0.01, fused = false)", False),
        ("sgd(lr = 0.01)", False),
        ("sgd(lr = 0.01, fused = true)", True),
    ],
)
def test_complex_parameters_are_not_updated_by_fused_kernels(optimizer: str, is_refused: bool) -> None:
    given = f'model python("support.models.untraced:build", what = "complex")\noptimizer {optimizer}\n'
    assert ("LP678" in codes(given)) is is_refused
    assert "LP678" not in codes(given.replace("complex", ""))
    parameter = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    parameter.grad = torch.ones(2, dtype=torch.complex64)
    algorithm = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[
        optimizer.partition("(")[0]
    ]
    if is_refused:
        with pytest.raises(RuntimeError, match="fused=True"):
            algorithm([parameter], lr=0.01, fused=True).step()
        return
    algorithm([parameter], lr=0.01, foreach=True).step()
    assert not torch.equal(parameter, torch.ones(2, dtype=torch.complex64))
