"""Observations of steps with one form of the loss, or one way to share parameters, for other steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.observed import beside_what_is_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

TEXT = """\
plan test
model   llama3("1b", n_layers = 12, dim = 4096, hidden_dim = 14336, vocab_size = 8192, tie_embeddings = false)
cluster h100_sxm
attention flash
batch   (global = 64, micro = 2, seq_len = 2048)
mesh    (MESH)
fsdp blocks on dp_replicate, dp_shard
checkpoint { layers.* = RULE }
loss    LOSS
precision (param = bf16, reduce = fp32)
"""
SHARDED = "dp_shard = 8"
UNIFORM = ("none", "full", "selective([attention])")
MIXED = ("first(7, full, others = selective([attention]))", "first(7, full)")
OTHERS = (
    ("eager", SHARDED),
    *(
        pytest.param(loss, mesh, marks=pytest.mark.slow)
        for loss, mesh in (
            ("chunked(4)", SHARDED),
            ("chunked(4, last_layer = true)", SHARDED),
            ("fused", "dp_replicate = 2, dp_shard = 4"),
        )
    ),
)
ROUNDED = 1.0 + 1e-9
CLOSE = 0.87
"""Least share of a step in its bounds."""


def analysed(rule: str, loss: str, mesh: str) -> Analysis:
    text = TEXT.replace("RULE", rule).replace("LOSS", loss).replace("MESH", mesh)
    linted = lint(text, "test.plan", directory=Path())
    assert linted.analysis is not None, linted.diagnostics
    return linted.analysis


def simulated(analysis: Analysis) -> Figures:
    assert analysis.manifest is not None
    return Figures.of(estimate(lower(analysis), analysis.plan, analysis.manifest, whole=False), analysis)


def compared(loss: str, mesh: str) -> list[tuple[Figures, Figures]]:
    """Figures of each treatment, from those under the fused loss and of `none`, and simulated."""
    fused = {rule: simulated(analysed(rule, "fused", SHARDED)) for rule in UNIFORM}
    own = simulated(analysed("none", loss, mesh))
    found = []
    for rule in UNIFORM:
        found.append((beside_what_is_of(own, fused[rule], fused["none"]), simulated(analysed(rule, loss, mesh))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "mesh"), OTHERS)
def test_treatments_differ_as_much_beside_other_losses_and_replicas(loss: str, mesh: str) -> None:
    for moved, seen in in_the_simulator(compared, loss, mesh):
        assert (moved.points.inside, moved.points.released) == (seen.points.inside, seen.points.released)
        assert moved.active == seen.active or mesh != SHARDED
        # Other ranks gather and reduce beside the blocks, and between which kernels the copies for a gather run depends
        # on when it becomes ready.
        assert moved.step_time == pytest.approx(seen.step_time, rel=4e-3)


def bounded(loss: str, mesh: str) -> tuple[list[bool], list[tuple[float, float, float, float]]]:
    """Whether shortfalls are known before and after one step beside another loss, and bounds of others beside it."""
    bounds = BoundsOf()

    def observe(rule: str, loss: str, mesh: str) -> None:
        analysis = analysed(rule, loss, mesh)
        figures = simulated(analysis)
        bounds.observe(analysis, figures.micro_batch, figures.moved, figures.points)
        bounds.shortfalls.observe(analysis, figures.micro_batch, figures.step_time)

    for rule in UNIFORM:
        observe(rule, "fused", SHARDED)
    known = [bounds.shortfalls.are_known(analysed("full", loss, mesh))]
    observe("none", loss, mesh)
    known.append(bounds.shortfalls.are_known(analysed("full", loss, mesh)))
    found = []
    for rule in (*UNIFORM[1:], *MIXED):
        analysis = analysed(rule, loss, mesh)
        least, seen = bounds(analysis), simulated(analysis)
        found.append((least.step_time, seen.step_time, least.memory, seen.active))
    return known, found


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "mesh"), OTHERS)
def test_one_step_beside_another_loss_bounds_all_treatments(loss: str, mesh: str) -> None:
    known, found = in_the_simulator(bounded, loss, mesh)
    assert known == [False, mesh == SHARDED]
    for least, seconds, memory, active in found:
        assert CLOSE * seconds < least <= ROUNDED * seconds
        assert CLOSE * active < memory <= ROUNDED * active
