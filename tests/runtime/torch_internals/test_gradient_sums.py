"""Sums of gradients that autograd makes in place, as its profiler shows them without a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime.torch_internals.operators import adds_gradients_in_place, called_from_python, running_backward

WEIGHTS = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]


class Doubled(torch.autograd.Function):
    """A function whose backward adds by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.clone()


def linear(x: torch.Tensor) -> torch.Tensor:
    """Three products of a matrix: their gradients are new tensors."""
    return sum(((2 * x) @ weight).sin() for weight in WEIGHTS)  # type: ignore[return-value]


def shared(x: torch.Tensor) -> torch.Tensor:
    """Three products of one tensor."""
    h = 2 * x
    return sum((h @ weight).sin() for weight in WEIGHTS)  # type: ignore[return-value]


def batched(x: torch.Tensor) -> torch.Tensor:
    """Three products of a batch, whose gradients are views of matrices."""
    h = (2 * x).unflatten(0, (2, 2))
    return sum(F.linear(h, weight).sin() for weight in WEIGHTS)  # type: ignore[return-value]


def residual(x: torch.Tensor) -> torch.Tensor:
    """A branch beside its input."""
    h = 2 * x
    return ((h + (h @ WEIGHTS[0]).sin()) * 3).cos()


def pieces(x: torch.Tensor) -> torch.Tensor:
    """Slices, each of whose backward makes a gradient of the whole."""
    h = 2 * x
    return sum(part.sin().sum() for part in h.tensor_split(4))  # type: ignore[return-value]


def split(x: torch.Tensor) -> torch.Tensor:
    """Pieces with one backward."""
    h = 2 * x
    return sum(part.sin().sum() for part in h.split(1))  # type: ignore[return-value]


def expanded(x: torch.Tensor) -> torch.Tensor:
    """A sum, whose gradient is one number that is expanded, beside a product."""
    h = 2 * x
    return h.sum() + (h @ WEIGHTS[0]).sin().sum()


def own(x: torch.Tensor) -> torch.Tensor:
    """A function in Python beside a product."""
    h = 2 * x
    return Doubled.apply(h).sin() + (h @ WEIGHTS[0]).sin()


def kept(x: torch.Tensor) -> torch.Tensor:
    """A gradient that a hook keeps."""
    h = 2 * x
    held: list[torch.Tensor] = []
    first = (h @ WEIGHTS[0]).sin()
    view = h.view_as(h)
    view.register_hook(held.append)
    return first + (view @ WEIGHTS[1]).sin() + (h @ WEIGHTS[2]).sin()


CASES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    linear, shared, batched, residual, pieces, split, expanded, own, kept,
]  # fmt: skip


class Chosen(TorchDispatchMode):
    """Notes for each sum of autograd whether it is made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[bool] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # whose wrapper would be another frame

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor and running_backward() and not called_from_python(__name__):
            in_place = adds_gradients_in_place(args)
            self.sums.append(in_place)
            func = torch.ops.aten.add_.Tensor if in_place else func
        return func(*args, **(kwargs or {}))


def summed(case: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    return case(torch.randn(4, 8, requires_grad=True)).sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_sums_are_made_in_place_as_autograd_does(case: Callable[[torch.Tensor], torch.Tensor]):
    loss = summed(case)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss.backward()
    expected = [
        event.name == "aten::add_"
        for event in sorted(profiled.events(), key=lambda event: event.time_range.start)
        if event.name in ("aten::add", "aten::add_")
        and event.cpu_parent is not None
        and event.cpu_parent.name.startswith("autograd::engine::evaluate_function")
        and "AccumulateGrad" not in event.cpu_parent.name
    ]
    loss = summed(case)
    with Chosen() as mode:
        loss.backward()
    assert mode.sums == expected


def test_cases_have_sums_of_both_kinds():
    found: list[bool] = []
    for case in CASES:
        loss = summed(case)
        with Chosen() as mode:
            loss.backward()
        found += mode.sums
    assert {True, False} == set(found)
