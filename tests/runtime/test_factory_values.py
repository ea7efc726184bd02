"""Initial values of a factory's model are its author's, on any mesh; the example of `docs/factories.md`."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from legoai.dsl.lint import lint
from legoai.runtime.device import Device
from legoai.runtime.initialize import cast_parameters, materialize
from legoai.specs.models.first_values import construct
from support import ROOT

CPU = Device(type="cpu")
FENCES = re.findall(r"^```(python)?\n(.*?)^```", (ROOT / "docs" / "factories.md").read_text(), re.M | re.S)
[FACTORY] = [text for language, text in FENCES if language]
[PLAN] = [text for language, text in FENCES if not language]


def build(**arguments: int) -> nn.Module:
    names: dict[str, Any] = {}
    exec(FACTORY, names)
    return names["build"](**arguments)


def started(mesh: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Weights and buffers of the example on a mesh: the local part of each, and its sharded dim."""
    model, first_values = construct(build, seed=3)
    cast_parameters(model, dtype)
    if mesh == "fsdp":
        for block in model.h:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    elif mesh == "tp":
        plan = {"h.*.c_fc": ColwiseParallel(), "h.*.c_proj": RowwiseParallel(), "h.*.attn.c_proj": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    materialize(model, device=CPU, seed=3, first_values=first_values)
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: part_of(tensor) for name, tensor in named}


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone(), None
    [placement] = tensor.placements
    return tensor.to_local().detach().clone(), placement.dim if isinstance(placement, Shard) else None


def test_initial_weights_equal_the_author_on_any_mesh(gloo):
    alone = {name: whole for name, (whole, _) in started("none").items()}
    for mesh in ("fsdp", "tp"):
        for rank, parts in enumerate(gloo(2)(started, mesh)):
            assert parts.keys() == alone.keys()
            cut = {
                name: whole if parts[name][1] is None else whole.chunk(2, parts[name][1])[rank]
                for name, whole in alone.items()
            }
            assert [name for name in alone if not torch.equal(parts[name][0], cut[name])] == [], mesh
    theirs = build()
    assert alone.keys() == {name for name, _ in (*theirs.named_parameters(), *theirs.named_buffers())}
    for name, parameter in (*theirs.named_parameters(), *theirs.named_buffers()):
        value, wanted = alone[name].float(), parameter.detach().float()
        if "weight" in name and wanted.std() > 0:
            assert value.std().item() == pytest.approx(wanted.std().item(), rel=0.08), name
            assert not torch.equal(value, alone["h.1.c_fc.weight" if "h.0.c_fc" in name else "h.0.c_fc.weight"].float())
        else:
            assert torch.equal(value, wanted), name


def test_tied_model_starts_with_uniform_predictions():
    """Tied to an output layer, embeddings as `nn.Embedding` draws them give a loss of many times this."""
    model, first_values = construct(build)
    materialize(model, device=CPU, seed=0, first_values=first_values)
    tokens = torch.randint(256, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)
    assert model.lm_head.weight is model.wte.weight


def test_parameters_take_the_master_dtype():
    started_in_double = started("none", torch.float64)
    assert {value.dtype for name, (value, _) in started_in_double.items() if name != "places"} == {torch.float64}


def test_uninitialised_parameters_of_the_example_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "nano.py").write_text(FACTORY)
    monkeypatch.delitem(sys.modules, "nano", raising=False)
    assert [item.code for item in lint(PLAN, "nano.plan", directory=tmp_path).diagnostics] == []

    empty = FACTORY.replace(
        "        self.apply(", "        self.gain = nn.Parameter(torch.empty(3))\n        self.apply("
    ).replace("torch.arange(block_size)", "torch.empty(block_size, dtype=torch.int64)")
    (tmp_path / "nano.py").write_text(empty)
    [found] = lint(PLAN, "nano.plan", directory=tmp_path).diagnostics
    assert (found.code, found.label.span.line) == ("LP229", 3)
    assert found.message == "no first value for `gain` of `Nano`, and 1 more"
    assert "reset_parameters" in found.help[0]

    filled = empty.replace(
        "    def forward(self, tokens",
        "    def reset_parameters(self):\n        nn.init.ones_(self.gain)\n\n"
        "    def init_buffers(self):\n        self.places.zero_()\n\n    def forward(self, tokens",
    )
    (tmp_path / "nano.py").write_text(filled)
    assert [item.code for item in lint(PLAN, "nano.plan", directory=tmp_path).diagnostics] == []
