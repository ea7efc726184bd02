"""Activations and optimizer state in host memory, on a CPU that is taken for another device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from legoai.runtime.offloading import offload


def test_only_activations_go_to_host_memory(monkeypatch):
    monkeypatch.setattr(offload, "HOST", torch.device("cpu", 0))  # another device than `cpu` to all who ask
    near, moved = offload._to_host, []
    monkeypatch.setattr(offload, "_to_host", lambda tensor: moved.append(tensor.shape) or near(tensor))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2))
    model = copy.deepcopy(plain)
    offload.offload_activations(model)
    batch = torch.randn(7, 3)
    for one in (plain, model):
        one(batch).square().sum().backward()
    assert moved
    assert all(shape[0] == 7 for shape in moved), moved
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(7, 4))
    moved.clear()
    plain(batch).sum().backward()
    assert not moved, "the hooks outlived the forward that failed"


@pytest.mark.parametrize("part", ["layers", "whole"])
def test_activations_of_compiled_modules_go_to_host_memory(part, monkeypatch):
    monkeypatch.setattr(offload, "HOST", torch.device("cpu", 0))
    near, moved = offload._to_host, []
    monkeypatch.setattr(offload, "_to_host", lambda tensor: moved.append(tensor.shape) or near(tensor))
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)) for _ in range(2)))
    model = copy.deepcopy(plain)
    for module in model if part == "layers" else [model]:
        module.compile(fullgraph=True, backend="aot_eager")
    offload.offload_activations(model)
    batch = torch.randn(7, 3)
    for _ in range(2):
        moved.clear()
        for one in (plain, model):
            one.zero_grad()
            one(batch).square().sum().backward()
        assert moved
        assert all(shape[0] == 7 for shape in moved), moved
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    moved.clear()
    plain(batch).sum().backward()
    assert not moved


def test_optimizer_state_is_in_host_memory_between_steps_only(monkeypatch):
    monkeypatch.setattr(offload, "HOST", torch.device("cpu", 0))
    stored = []
    near = offload._to_host
    monkeypatch.setattr(
        offload, "_to_host", lambda tensor, wait: stored.append(tensor.shape) or near(tensor, wait=wait)
    )
    one, other = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    plain = torch.optim.AdamW([one], lr=0.1)
    far = offload.offload_optimizer_state(torch.optim.AdamW([other], lr=0.1))
    for step in range(3):
        one.grad, other.grad = torch.full((3, 2), step + 1.0), torch.full((3, 2), step + 1.0)
        plain.step()
        far.step()
    assert stored == [torch.Size((3, 2))] * 6, "two moments after each step, and no count of steps"
    assert torch.equal(one, other)
    assert torch.equal(far.state[other]["exp_avg"], plain.state[one]["exp_avg"])
