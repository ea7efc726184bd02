"""Tensors that a forward changes in place: inputs of modules, and results of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.manifest import Manifest
from support.in_place_factories import build


def changes(model: nn.Module) -> dict[str, tuple[bool, set[tuple[str, str]], bool]]:
    manifest = describe(model.to("meta"), "model", shapes=True)
    assert manifest.flow_error is None
    assert Manifest.from_json(manifest.to_json()) == manifest
    found = {path: info.changes for path, info in manifest.modules.items()}
    return {
        path: (item.own_input, {result[:2] for result in item.results}, item.noise)
        for path, item in found.items()
        if any(item)
    }


@pytest.mark.parametrize(
    ("kind", "trained", "received"), [("inputs", True, True), ("sums", True, False), ("constant", False, False)]
)
def test_changed_inputs_are_told_by_where_they_come_from(kind: str, trained: bool, received: bool):
    found = describe(build(kind).to("meta"), "model", shapes=True).modules["blocks.1"].changes
    assert (found.own_input, found.trained_input, found.received_input) == (True, trained, received)


def test_inputs_computed_from_frozen_parameters_have_no_gradient():
    model = build("inputs", depth=1).requires_grad_(False)
    assert not describe(model.to("meta"), "model", shapes=True).modules["blocks.0"].changes.trained_input


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
    ("cast", "is_copy"),
    [
        (lambda x: x.float(), True),
        (lambda x: x.to(torch.float32)[:, :2], True),
        (lambda x: x.to(dtype=torch.float32).view(-1), True),
        (lambda x: x.type_as(x), True),
        (lambda x: x.to(x.device), False),
        (lambda x: x.contiguous(), False),
    ],
)
def test_cast_counts_as_copy(cast: Callable[[torch.Tensor], torch.Tensor], is_copy: bool):
    class Casts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = cast(x)
            y *= 2.0
            return super().forward(x)

    model = build("none", depth=1)
    model.blocks[0].up = Casts(16, 16)
    found = describe(model.to("meta"), "model", shapes=True).modules["blocks.0.up"].changes
    assert (found.own_input, found.cast_input) == (not is_copy, is_copy)


def test_changed_casts_of_results_are_told_apart():
    class Casts(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).float()
            y -= y.mean(-1, keepdim=True)
            return y

    model = build("none", depth=1)
    model.blocks[0] = Casts(nn.Linear(16, 16))
    found = describe(model.to("meta"), "model", shapes=True).modules["blocks.0"].changes
    assert [(result.path, result.by, result.behind_cast) for result in found.results] == [("0", "", True)]


@pytest.mark.parametrize(("kind", "operator"), [("used", "aten.mm.default"), ("unused", "")])
def test_changed_results_are_told_by_what_their_module_computes_with_them(kind: str, operator: str):
    found = describe(build(kind).to("meta"), "model", shapes=True).modules["blocks.0"].changes.results
    assert {result[:3] for result in found} == {("router", "", operator), ("router.gate", "", "")}


@pytest.mark.parametrize(("kind", "is_view"), [("views", True), ("results", False)])
def test_changed_results_that_are_views_are_told(kind: str, is_view: bool):
    found = describe(build(kind).to("meta"), "model", shapes=True).modules["blocks.0"].changes.results
    assert {result.path: result.is_view for result in found} == {"up": is_view, "down": is_view}
