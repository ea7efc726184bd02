"""Modes of compilation: assumptions of the estimate, and refusals where lint warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.compilation import graphs, inductor  # noqa: F401 (imported once, before the processes that need it)
from legoai.cost.estimate import CannotEstimateError, Estimate, estimate
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulated import in_a_fork
from support.simulation.simulator import in_the_simulator

PLAN = """
plan modes
model   llama3("tiny", n_layers = 2)
cluster {cluster}(devices = 2)
batch   (global = 4, micro = 1, seq_len = 64)
mesh    ({axis} = 2)
{data}
optimizer adamw(lr = 1e-3)
compile {{ {path} = inductor(mode = {mode}) }}
"""
UNITS = "fsdp on dp_shard { layers.* = unit }"
REPLICAS = "replicate on dp_replicate"


def linted_plan(mode: str, data: str = REPLICAS, path: str = "layers.*.feed_forward", cluster: str = "h100_sxm"):
    axis = "dp_shard" if data.startswith("fsdp") else "dp_replicate"
    text = PLAN.format(cluster=cluster, axis=axis, data=data, path=path, mode=mode)
    linted = lint(text, "modes.plan", directory=Path())
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    return linted


def estimated(*args: str) -> Estimate:
    analysis = linted_plan(*args).analysis
    return estimate(lower(analysis), analysis.plan, analysis.manifest)


def figures(*args: str) -> tuple[float, float, tuple[str, ...]]:
    found = estimated(*args)
    return found.step_time, found.peak_reserved, found.assumptions


@pytest.mark.slow
def test_autotuned_products_have_library_cost_and_a_stated_assumption():
    for mode, same in (("max_autotune", "reduce_overhead"), ("max_autotune_no_cudagraphs", "default")):
        *costs, assumed = in_the_simulator(figures, mode)
        *others, silent = in_the_simulator(figures, same)
        assert costs == others
        [line] = set(assumed) - set(silent)
        assert line.startswith(f"matrix products under `{mode}` are those of the library")


@pytest.mark.parametrize(
    "mode", ["reduce_overhead", pytest.param("max_autotune_no_cudagraphs", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("data", "path", "cluster"),
    [
        (UNITS, "layers.*", "h100_sxm"),
        (UNITS, "layers.*.feed_forward", "h100_sxm"),
        pytest.param("fsdp on dp_shard { root = unit }", "norm", "h100_sxm", marks=pytest.mark.slow),
        (UNITS, "norm", "cpu"),
        pytest.param(REPLICAS, "layers.*.feed_forward", "h100_sxm", marks=pytest.mark.slow),
    ],
)
def test_lint_warns_of_unsimulated_cuda_graphs(mode: str, data: str, path: str, cluster: str):
    warned = any(item.code == "LP636" for item in linted_plan(mode, data, path, cluster).diagnostics)
    try:
        in_a_fork(figures, mode, data, path, cluster)
    except CannotEstimateError as error:
        assert "[LP636]" in str(error)
        assert warned
    else:
        assert not warned
