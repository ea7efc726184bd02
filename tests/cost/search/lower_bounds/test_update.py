"""Lower bound of the optimizer's update, against the simulated update."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.update import seconds_of_update
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

TEXT = """\
plan test
model llama3("1b", n_layers = 2)
cluster h100_sxm(devices = 4)
batch (global = 8, micro = 1, seq_len = 512)
mesh (dp_replicate = 2, dp_shard = 2)
fsdp blocks on dp_replicate, dp_shard
"""
OPTIMIZERS = {
    "adamw": 0.65,
    "adam\nprecision (master = bf16)": 0.65,
    "sgd(momentum = 0.9)": 0.5,
    "sgd": 0.5,
    "adamw { layers.*.feed_forward.* = muon(lr = 0.02) }": 0.0,
}
"""Least share of the update that the bound is."""


def analysed(optimizer: str, *lines: str) -> Analysis:
    text = "".join([TEXT, f"optimizer {optimizer}\n", *(f"{line}\n" for line in lines)])
    linted = lint(text, "test.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    return linted.analysis


def update(optimizer: str) -> tuple[float, float]:
    """The bound of the update, and its simulated time."""
    analysis, bounds = analysed(optimizer), BoundsOf()
    assert analysis.manifest is not None
    took = estimate(lower(analysis), analysis.plan, analysis.manifest).slowest.breakdown.by_phase["optimizer"]
    return seconds_of_update(analysis, bounds.machine(analysis)), took


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_is_bounded(optimizer: str) -> None:
    least, took = in_the_simulator(update, optimizer)
    assert OPTIMIZERS[optimizer] * took <= least <= took
    assert least > 0.0


def test_update_on_the_host_is_not_bounded() -> None:
    analysis, bounds = analysed("adamw", "offload (optimizer = all)"), BoundsOf()
    assert seconds_of_update(analysis, bounds.machine(analysis)) == 0.0
