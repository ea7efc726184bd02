"""Assumptions of an estimate that follow from the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.api import estimate
from legoai.cost.assumptions import of_kernels
from legoai.cost.profiles import profile
from legoai.dsl.lint import lint
from support.marks import some_slow
from support.simulation.simulator import in_the_simulator

PLAN = """plan small
model gpt2("small", vocab_size = {})
cluster b200
batch (global = 8, micro = 1, seq_len = 1024)
mesh (dp_shard = 8)
fsdp blocks on dp_shard
"""


@pytest.mark.parametrize(
    ("vocabulary", "assumed"),
    [
        (50257, ["products of logits over 50,257 tokens, not a multiple of 8, are as fast as those of a multiple"]),
        (50304, []),
    ],
)
def test_products_of_odd_sizes_are_assumed_to_be_as_fast(vocabulary: int, assumed: list[str]):
    analysis = lint(PLAN.format(vocabulary), "small.plan", directory=Path()).analysis
    assert analysis is not None
    assert analysis.manifest is not None
    assert list(of_kernels(analysis.plan, analysis.manifest, Path(), profile("b200"))) == assumed
    assert list(of_kernels(analysis.plan, analysis.manifest, Path(), profile("h100_sxm"))) == []


LAYERS = """plan small
model llama3("tiny", dim = 256, n_layers = 2, hidden_dim = {})
cluster {}
batch (global = 8, micro = 1, seq_len = 128)
mesh (dp_shard = 4, tp = 2)
shard standard on tp
fsdp blocks on dp_shard
{}
"""


def assumed_of(text: str) -> list[str]:
    analysis = lint(text, "small.plan", directory=Path()).analysis
    assert analysis is not None
    assert analysis.manifest is not None
    return list(of_kernels(analysis.plan, analysis.manifest, Path(), profile(analysis.plan.cluster.device)))


@pytest.mark.parametrize("features", [512, 520])
def test_layers_of_odd_sizes_on_a_rank_are_assumed_to_be_as_fast(features: int):
    odd = [
        "products of `layers.*.feed_forward.w1`, `layers.*.feed_forward.w2` and `layers.*.feed_forward.w3`, whose "
        "features are not a multiple of 8, are as fast as those of a multiple"
    ]
    assert assumed_of(LAYERS.format(features, "b200", "")) == ([] if features == 512 else odd)
    assert assumed_of(LAYERS.format(features, "h100_sxm", "")) == []
    padded = [line.replace("as fast as those of a multiple", "padded where inductor compiles them, which it decides "
              "by a measurement") for line in odd]  # fmt: skip
    compiled = assumed_of(LAYERS.format(features, "h100_sxm", "compile { layers.* = inductor }"))
    assert compiled == ([] if features == 512 else padded)
    assert assumed_of(LAYERS.format(features, "cpu(devices = 8)", "")) == []


@pytest.mark.parametrize(
    ("recipe", "cluster", "said"),
    [
        ("tensorwise", "h100_sxm", "products in float8 of backward are as fast as those of forward"),
        ("tensorwise", "b200", None),
        ("rowwise", "h100_sxm", "products in float8 with scales of rows are as fast as those with scales of tensors"),
        ("rowwise_with_gw_hp", "b200", "products in float8 with scales of rows are as fast"),
        ("rowwise", "cpu(devices = 8)", None),
    ],
)
def test_what_no_profile_knows_of_products_in_float8_is_assumed(recipe: str, cluster: str, said: str | None):
    rules = f"precision {{ layers.*.feed_forward.{{w1, w2, w3}} = float8({recipe}) }}"
    found = assumed_of(LAYERS.format(512, cluster, rules))
    assert [line.startswith(said or "") for line in found] == [True] * (said is not None)


RECURRENT = """plan small
model python("support.models.recurrent:build", layer = "{}")
cluster {}
batch (global = 8, micro = 8, seq_len = 32)
"""


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN", "GRUCell"])
def test_recurrent_layers_are_assumed_to_run_as_loops_on_a_gpu(layer: str):
    said = [
        "recurrent layers (`mixer`) run token by token, operator by operator, where cuDNN has kernels for a whole "
        "sequence: these take less time"
    ]
    assert assumed_of(RECURRENT.format(layer, "h100_sxm(devices = 1)")) == (said if layer != "GRUCell" else [])
    assert assumed_of(RECURRENT.format(layer, "cpu(devices = 1)")) == []


COMPILED = """
import torch
from torch import nn
from torch.nn import functional as F


@torch.compile
def gated(x):
    return F.gelu(x) * x.sigmoid()


def plain(x):
    return F.gelu(x) * x.sigmoid()


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(16, 16), function

    def forward(self, x):
        return x + self.function(self.layer(x))


class Net(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(Block(gated if compiled else plain) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
CALLING = """plan calling
model python("{}:Net", compiled = {})
cluster cpu(devices = 2)
batch (global = 8, micro = 2, seq_len = 32)
mesh (dp_shard = 2)
fsdp on dp_shard {{ blocks.* = unit }}
{}
"""


def estimated(plan: Path) -> tuple[float, tuple[str, ...]]:
    """Seconds of a step, and assumptions."""
    found = estimate(plan)
    return found.step_time, tuple(found.assumptions)


@pytest.mark.parametrize(
    "rest", some_slow(("", "compile { blocks.* = aot_eager }"), "compile { blocks.* = aot_eager }")
)
def test_functions_that_the_model_compiles_run_operator_by_operator(rest: str, tmp_path: Path):
    name = f"compiles_itself_{len(rest)}"
    (tmp_path / f"{name}.py").write_text(COMPILED)
    times = []
    for compiled in ("true", "false"):
        plan = tmp_path / f"calling_{compiled}.plan"
        plan.write_text(CALLING.format(name, compiled, rest))
        seconds, assumed = in_the_simulator(estimated, plan)
        times.append(seconds)
        assert [line.startswith("functions that the model itself compiles") for line in assumed][-1:] == [
            compiled == "true"
        ]
    assert times[0] == times[1]
