"""Initial values from a constructor on the meta device equal those on a real device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.specs.models.first_values import construct
from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.random_operators import is_random, seed_generators

CPU = torch.device("cpu")


class Seeded(TorchDispatchMode):
    """Gives each operator that draws random numbers a seed of its own, its number."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_random(func, args, kwargs or {}):
            torch.manual_seed(self.draws)
            self.draws += 1
        return func(*args, **(kwargs or {}))


def on_cpu(build: Callable[[], nn.Module]) -> nn.Module:
    with Seeded():
        return build()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


class NanoGPT(nn.Module):
    """Initialised as nanoGPT is: by a function that is applied to every module, and by name after that."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"ln": nn.LayerNorm(width), "c_attn": nn.Linear(width, width), "c_proj": nn.Linear(width, width)}
            )
            for _ in range(depth)
        )
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
        self.lm_head = nn.Linear(width, 50, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * depth))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)


class Unusual(nn.Module):
    """Values that come about in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3) * math.log(7))
        self.temperature = nn.Parameter(torch.tensor(2.5))
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.old = nn.Linear(3, 4)
        self.old.weight.data.normal_(0, 0.5)
        self.old.bias.data = torch.full((4,), 0.25)
        fused = torch.empty(6, 4)
        for index, part in enumerate(fused.chunk(3)):
            nn.init.uniform_(part, index, index + 1)
        self.fused = nn.Parameter(fused)
        self.padded = nn.Embedding(5, 3, padding_idx=1)
        self.scaled = nn.Linear(3, 3)
        with torch.no_grad():
            self.scaled.weight *= 0.1
            self.scaled.bias[1:] += 3
            self.scaled.weight[0].copy_(self.scale)
        self.copies = nn.ModuleList(copy.deepcopy(self.old) for _ in range(2))
        self.transposed = nn.Parameter(torch.randn(3, 5).t().contiguous())
        self.strided = nn.Parameter(torch.randn(3, 5).t())
        self.loaded = nn.Linear(2, 2)
        self.loaded.load_state_dict(
            {"weight": torch.eye(2, device="cpu"), "bias": torch.tensor([4.0, 5.0], device="cpu")}
        )
        self.shared = nn.Parameter(self.fused.data[:2])
        self.norm = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        angles = torch.outer(torch.arange(6), 1 / 100 ** (torch.arange(0, 4, 2).float() / 4))
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.batch = nn.BatchNorm1d(4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
        self.host = nn.Parameter(torch.arange(3.0, device="cpu"))


@pytest.mark.parametrize("build", [NanoGPT, Unusual])
def test_every_initial_value_equals_the_constructor_bitwise(build):
    expected = tensors(on_cpu(build))
    model, first_values = construct(build)
    found = tensors(model)
    assert found.keys() == expected.keys()
    for name, wanted in reversed(expected.items()):  # in any order
        assert first_values.holds(name, found[name].shape), name
        value = first_values.value(name, device=CPU, seed_of=lambda draw: draw)
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(value, wanted), name


class Looking(nn.Module):
    """Filled by functions that look at values, and therefore do nothing on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal, self.truncated = nn.Linear(6, 4), nn.Linear(50, 50)
        self.far = nn.Parameter(torch.zeros(50, 50))
        orthogonal_(self.orthogonal.weight, gain=2)
        nn.init.trunc_normal_(self.truncated.weight, std=0.1, a=-0.2, b=0.2)
        nn.init.trunc_normal_(self.far, mean=0.0, std=0.1, a=0.3, b=0.4)
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(3, 3, 5)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 10), sparsity=0.3))
        self.later = nn.Linear(6, 4)


def test_initialisers_without_meta_kernels_are_replayed():
    _, first_values = construct(Looking)

    def value(name: str) -> torch.Tensor:
        return first_values.value(name, device=CPU, seed_of=lambda draw: draw)

    orthogonal, truncated, far = value("orthogonal.weight"), value("truncated.weight"), value("far")
    torch.testing.assert_close(orthogonal @ orthogonal.T, 4 * torch.eye(4))
    assert truncated.abs().max() <= 0.2
    assert truncated.std().item() == pytest.approx(0.088, rel=0.05)
    assert 0.3 <= far.min() < far.max() <= 0.4
    assert torch.equal(value("dirac"), nn.init.dirac_(torch.empty(3, 3, 5)))
    assert (value("sparse") == 0).sum() == 30
    assert torch.equal(value("truncated.weight"), truncated)


class OffMeta(nn.Module):
    """Has tied parameters, and a buffer, that its constructor makes on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False, device="cpu")
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((2,), 3.0, device="cpu"))


def test_tensors_on_another_device_keep_their_values_and_ties_on_the_meta_device():
    model, first_values = construct(OffMeta)
    assert model.first.weight is model.second.weight
    assert model.first.weight.is_meta and model.scale.is_meta
    assert first_values.value("scale", device=CPU, seed_of=lambda draw: 0).tolist() == [3.0, 3.0]
    assert first_values.holds("second.weight", torch.Size([2, 2]))


class Initialising(nn.Module):
    """Fills some of its parameters by `initialise_module`, and others nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.left = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
        self.given = nn.Parameter(torch.ones(3))

    def initialise_module(self, path: str, parameters: dict, buffers: dict) -> None:
        nn.init.trunc_normal_(parameters["drawn"], std=0.1)


def test_what_neither_the_constructor_nor_the_model_fills_is_found():
    model, first_values = construct(Initialising)
    assert describe(model, "theirs", first_values).unfilled == ("left",)


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(3))
        self.begun = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            self.begun[:2] = 1
        self.full = nn.Parameter(torch.zeros(3))


def test_uninitialised_tensors_are_not_recorded():
    model, first_values = construct(Unfilled)
    held = {name for name, tensor in tensors(model).items() if first_values.holds(name, tensor.shape)}
    assert held == {"full"}
    assert not first_values.holds("full", torch.Size([4])), "a parameter that was replaced by another"
    begun = first_values.value("begun", device=CPU, seed_of=lambda draw: draw)
    assert begun[:2].tolist() == [1, 1]
    assert begun[2:].isnan().all()


def test_construction_preserves_rng_state_and_reproduces_cpu_draws():
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(3))
            with torch.no_grad():
                self.table.copy_(torch.randn(3, device="cpu"))

    before = torch.get_rng_state()
    values = [construct(Host, seed=seed)[1].value("table", device=CPU, seed_of=int) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


class Spaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 3))


def test_a_constructor_that_was_replaced_in_the_first_context_of_the_process_is_recorded(monkeypatch):
    constructors = torch.utils._device._device_constructors
    with monkeypatch.context() as patch:
        # As `from_pretrained` of transformers 5 does, in which the process has its first context of a device.
        patch.setattr(torch, "linspace", lambda *args, **kwargs: torch.zeros(3))
        constructors.cache_clear()
        constructors()
    model, first_values = construct(Spaced)
    assert model.table.is_meta
    assert first_values.value("table", device=CPU, seed_of=int).tolist() == [0, 0.5, 1]


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_seeded_generators_draw_as_after_torch_manual_seed(kind: str):
    seed = 2**63 - 1
    torch.manual_seed(seed)
    expected = torch.rand(3), torch.rand(3, device=kind)
    seed_generators(seed, torch.device(kind))
    assert all(map(torch.equal, (torch.rand(3), torch.rand(3, device=kind)), expected))
