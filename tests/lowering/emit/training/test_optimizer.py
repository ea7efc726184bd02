"""Every optimizer updates plain parameters and DTensors, fused and not, or lint refuses it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.training.staged import train

HEAD = """\
plan updates
model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 4, micro = 2, seq_len = 16)
"""
MESHES = {
    "plain": "",
    "fsdp": "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n",
    "tensor parallel beside plain norms": """\
mesh (tp = 2)
precision (param = fp32)
shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }
""",
    "replicas": "mesh (dp_replicate = 2)\nreplicate on dp_replicate\n",
    "replicas that share the state": "mesh (dp_replicate = 2)\nreplicate on dp_replicate (optimizer = sharded)\n",
}
OPTIMIZERS = (
    *("adamw(fused = true)", "adamw(fused = false)", "adam(fused = true)", "adam(fused = false)"),
    *("sgd", "sgd(fused = true)", "sgd(momentum = 0.9, nesterov = true)", "sgd(momentum = 0.9, fused = true)"),
)
CASES = list(itertools.product(MESHES, OPTIMIZERS))


def trained(programs: list[str], data: str) -> list[float]:
    """A sum over the parameters of each program after one update."""
    sums = []
    for program in programs:
        parameters = train(program, data, steps=1)["parameters"].values()
        sums.append(sum(float(parameter.double().sum()) for parameter in parameters))
    return sums


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES[::3], id="a third"), pytest.param(CASES, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(120)
def test_every_optimizer_updates_or_is_refused(cases, gloo, data):
    alone, together, refusals = [], [], 0
    for mesh, optimizer in cases:
        head = HEAD if mesh != "plain" else HEAD.replace("devices = 2", "devices = 1")
        linted = lint(f"{head}{MESHES[mesh]}optimizer {optimizer}\n", "updates.plan", directory=Path())
        errors = {item.code for item in linted.diagnostics if item.severity == "error"}
        refused = optimizer.startswith("sgd") and "fused" in optimizer and mesh != "plain"
        refusals += refused
        assert errors == ({"LP685"} if refused else set()), (mesh, optimizer, errors)
        if not refused:
            (alone if mesh == "plain" else together).append(lower(linted.analysis).text)
    sums = gloo(1)(trained, alone, data)[0] + gloo(2)(trained, together, data)[0]
    assert len(sums) == len(cases) - refusals > 0
    assert all(map(math.isfinite, sums))
