"""Buffers that forward updates are reported where ranks or recomputation make them differ from one device's."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.rule_plans import codes, diagnostics

FACTORY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.table = torch.arange(x.shape[1], device=x.device)
        {update}
        return x + self.layer(x - self.mean) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
IN_PLACE = "self.mean.lerp_(x.detach().mean((0, 1)), 0.1)"
REPLACED = "self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1)"
SHARDS = "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n"
STAGES = "mesh (pp = 2)\ncluster cpu(devices = 2)\npipeline on pp (schedule = 1F1B)\n"


@pytest.mark.parametrize("update", [IN_PLACE, REPLACED])
def test_buffers_that_forward_updates_are_reported(tmp_path: Path, update: str):
    (tmp_path / "net.py").write_text(FACTORY.replace("{update}", update))
    plan = 'model python("net:Net")\n'
    [found] = [item for item in diagnostics(plan + SHARDS, tmp_path) if item.code == "LP660"]
    assert found.severity == "warning"
    assert found.message == (
        "forward updates `blocks.0.mean` and 1 more: each rank of `dp_shard` has values of its own"
    )
    assert "LP660" not in codes(plan + STAGES, tmp_path)
    again = diagnostics(f"{plan}{STAGES}checkpoint {{ blocks.1 = full }}\n", tmp_path)
    [found] = [item for item in again if item.code == "LP660"]
    assert found.message == "forward updates `blocks.1.mean`, once more when it is recomputed"


@pytest.mark.parametrize("update", [IN_PLACE, REPLACED])
def test_buffers_that_no_checkpoint_keeps_are_reported_on_one_rank_too(tmp_path: Path, update: str):
    factory = FACTORY.replace('"mean", torch.zeros(16)', '"mean", torch.zeros(16), persistent=False')
    (tmp_path / "net.py").write_text(factory.replace("{update}", update))
    plan = 'model python("net:Net")\n'
    [found] = [item for item in diagnostics(plan + STAGES, tmp_path) if item.code == "LP660"]
    assert found.severity == "warning"
    assert found.message == "forward updates `blocks.0.mean` and 1 more, which no checkpoint keeps"
    assert found.help == ("register it with `persistent=True`",)
    several = [item for item in diagnostics(plan + SHARDS, tmp_path) if item.code == "LP660"]
    assert [item.message for item in several] == [
        found.message,
        "forward updates `blocks.0.mean` and 1 more: each rank of `dp_shard` has values of its own",
    ]
    assert several[1].label.text == "nothing makes them equal"


def test_other_buffers_are_not_reported(tmp_path: Path):
    (tmp_path / "net.py").write_text(FACTORY.replace("{update}", "pass"))
    assert "LP660" not in codes(f'model python("net:Net")\n{SHARDS}checkpoint {{ blocks.* = full }}\n', tmp_path)


NORMALISED = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(256, 16), nn.BatchNorm1d(16), nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
"""


def test_running_statistics_of_batch_normalisation_are_reported(tmp_path: Path):
    (tmp_path / "net.py").write_text(NORMALISED)
    plan = 'model python("net:Net")\nmesh (dp_shard = 8)\nfsdp on dp_shard { head = unit }\n'
    [found] = [item for item in diagnostics(plan, tmp_path) if item.code == "LP660"]
    assert "`norm.running_mean` and 2 more" in found.message


SYNCHRONISED = NORMALISED.replace("nn.BatchNorm1d", "nn.SyncBatchNorm")


def test_statistics_of_all_ranks_are_not_reported(tmp_path: Path):
    (tmp_path / "net.py").write_text(SYNCHRONISED)
    plan = 'model python("net:Net")\nmesh (dp_shard = 8)\nfsdp on dp_shard { head = unit }\n'
    assert "LP660" not in codes(plan, tmp_path)
    [found] = [item for item in diagnostics(f"{plan}checkpoint {{ norm = full }}\n", tmp_path) if item.code == "LP660"]
    assert found.message == "forward updates `norm.running_mean`, once more when it is recomputed"


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("cluster cpu(devices = 2)\nmesh (dp_shard = 2)\nfsdp on dp_shard { head = unit }\n", "LP649"),
        ("cluster cpu(devices = 1)\n", "LP649"),
        ("cluster h100_sxm(devices = 1)\n", None),
        ("cluster h100_sxm(devices = 2)\nmesh (pp = 2)\npipeline on pp (split = [head])\n", "LP649"),
        ("cluster h100_sxm(devices = 2)\nmesh (dp_shard = 2)\nfsdp on dp_shard { head = unit }\n", "LP717"),
    ],
)
def test_normalisation_by_samples_of_all_ranks_needs_gpus_and_is_not_simulated(
    plan: str, found: str | None, tmp_path: Path
):
    (tmp_path / "net.py").write_text(SYNCHRONISED)
    given = diagnostics(f'model python("net:Net")\n{plan}', tmp_path)
    among = {item.code: item for item in given if item.code in ("LP649", "LP717")}
    assert found in among if found else not among
    if found == "LP649":
        assert "`norm` of class `SyncBatchNorm` normalises by the samples of all ranks" in among[found].message
    elif found == "LP717":
        assert "the model normalises by the samples of all ranks (`norm`)" in among[found].message


@pytest.mark.parametrize(
    ("precision", "refused"), [("param = bf16", True), ("master = bf16, param = bf16", True), ("param = fp32", False)]
)
def test_batch_normalisation_of_narrow_weights_is_refused_on_a_cpu(precision: str, refused: bool, tmp_path: Path):
    (tmp_path / "net.py").write_text(NORMALISED)
    rest = f"mesh (dp_shard = 8)\nfsdp on dp_shard {{ head = unit }}\nprecision ({precision})\n"
    plan = f'model python("net:Net")\ncluster cpu(devices = 8)\n{rest}'
    found = [item.message for item in diagnostics(plan, tmp_path) if item.code == "LP010"]
    assert any("`norm` keeps the statistics of batches in fp32" in message for message in found) == refused, found
