"""Tensors that a forward changes in place: inputs of modules, and results of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.manifest import Manifest
from support.models.in_place_factories import build


def changes(model: nn.Module) -> dict[str, tuple[bool, set[tuple[str, str]], bool]]:
    manifest = describe(model.to("meta"), "model", shapes=True)
    assert manifest.flow_error is None
    assert Manifest.from_json(manifest.to_json()) == manifest
    found = {path: info.changes.bf16 for path, info in manifest.modules.items()}
    assert found == {path: info.changes.fp32 for path, info in manifest.modules.items()}
    return {
        path: (item.own_input, {result[:2] for result in item.results}, item.noise)
        for path, item in found.items()
        if any(item)
    }


@pytest.mark.parametrize(
    ("kind", "trained", "received"), [("inputs", True, True), ("sums", True, False), ("constant", False, False)]
)
def test_changed_inputs_are_told_by_where_they_come_from(kind: str, trained: bool, received: bool):
    found = describe(build(kind).to("meta"), "model", shapes=True).modules["blocks.1"].changes.bf16
    assert (found.own_input, found.trained_input, found.received_input) == (True, trained, received)


def test_inputs_computed_from_frozen_parameters_have_no_gradient():
    model = build("inputs", depth=1).requires_grad_(False)
    assert not describe(model.to("meta"), "model", shapes=True).modules["blocks.0"].changes.bf16.trained_input


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", {}),
        ("results", {"blocks.0": (False, {("up", "act"), ("down", "")}, False), "blocks.0.act": (True, set(), False)}),
        (
            "inputs",
            {"": (False, {("embeddings", "blocks.0")}, False), "blocks.0": (True, set(), False)},
        ),
        ("between", {"": (False, {("blocks.0", "")}, False)}),
        ("used", {"blocks.0": (False, {("router", ""), ("router.gate", "")}, False)}),
        ("noise", {"blocks.0": (False, set(), True)}),
    ],
)
def test_changes_are_noted_of_the_modules_that_see_them(kind: str, expected: dict):
    assert changes(build(kind, depth=1)) == expected


def test_changes_of_own_buffers_and_of_new_tensors_are_none():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))

        def example_inputs(self) -> tuple[torch.Tensor, ...]:
            return (torch.empty(2, 4),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.sum(0)
            return self.layer(x).clone().mul_(2.0) + torch.zeros_like(x).add_(1.0)

    assert changes(Counts()) == {}


@pytest.mark.parametrize(
    ("cast", "fp32", "bf16"),
    [
        (lambda x, _: x.float(), True, False),
        (lambda x, _: x.to(torch.float32)[:, :2], True, False),
        (lambda x, _: x.to(dtype=torch.float32).view(-1), True, False),
        (lambda x, _: x.to(torch.bfloat16), False, True),
        (lambda x, _: x.double(), False, False),
        (lambda x, _: x.to(x.dtype), True, True),
        (lambda x, _: x.type_as(x), True, True),
        (lambda x, layer: x.to(layer.weight.dtype), True, True),
        (lambda x, layer: x.type_as(layer.weight), True, True),
        (lambda x, _: x.to(x.device), True, True),
        (lambda x, _: x.contiguous(), True, True),
    ],
)
def test_cast_to_the_own_dtype_is_no_copy(cast: Callable[..., torch.Tensor], fp32: bool, bf16: bool):
    class Casts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = cast(x, self)
            y *= 2.0
            return super().forward(x)

    model = build("none", depth=1)
    model.blocks[0].up = Casts(16, 16)
    manifest = describe(model.to("meta"), "model", shapes=True)
    found = manifest.modules["blocks.0.up"].changes
    assert (found.fp32.own_input, found.bf16.own_input) == (fp32, bf16)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_changed_casts_of_results_are_told_apart():
    class Casts(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).float()
            y -= y.mean(-1, keepdim=True)
            return y.to(x.dtype)

    model = build("none", depth=1)
    model.blocks[0] = Casts(nn.Linear(16, 16))
    found = describe(model.to("meta"), "model", shapes=True).modules["blocks.0"].changes
    assert [result[:3] for result in found.fp32.results] == [("0", "", "")]
    assert found.bf16.results == ()


def test_norms_that_compute_in_fp32_change_nothing():
    class Norm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given, x = x.dtype, x.to(torch.float32)
            x -= x.mean(-1, keepdim=True)
            x *= x.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
            return self.weight * x.to(given)

    model = build("none", depth=1)
    model.blocks[0].norm = Norm(16)
    found = describe(model.to("meta"), "model", shapes=True).modules["blocks.0.norm"].changes
    assert (found.fp32.own_input, found.bf16.own_input) == (True, False)


def test_buffers_in_fp32_are_cast_where_forward_takes_none():
    class Angles(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("angles", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float()
            y += 1.0
            return super().forward(x + self.angles)

    model = build("none", depth=1)
    model.blocks[0].up = Angles()
    found = describe(model.to("meta"), "model", shapes=True).modules["blocks.0.up"].changes
    assert (found.fp32.own_input, found.bf16.own_input) == (True, False)
    assert model.blocks[0].up.angles.dtype == torch.float32


@pytest.mark.parametrize(("kind", "operator"), [("used", "aten.mm.default"), ("unused", "")])
def test_changed_results_are_told_by_what_their_module_computes_with_them(kind: str, operator: str):
    found = describe(build(kind).to("meta"), "model", shapes=True).modules["blocks.0"].changes.bf16.results
    assert {result[:3] for result in found} == {("router", "", operator), ("router.gate", "", "")}


@pytest.mark.parametrize(("kind", "is_view"), [("views", True), ("results", False)])
def test_changed_results_that_are_views_are_told(kind: str, is_view: bool):
    found = describe(build(kind).to("meta"), "model", shapes=True).modules["blocks.0"].changes.bf16.results
    assert {result.path: result.is_view for result in found} == {"up": is_view, "down": is_view}
