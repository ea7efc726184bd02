"""Searches over models of whose layers no bound is known: what a simulation shows, or no bound at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legoai.cost.report.solution import document, terminal
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Outcome
from legoai.cost.search.lower_bounds import model_layers
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork
from legoai.cost.search.solve import Solution, solve
from legoai.dsl.analysis.analysis import Analysis
from support.marks import NEEDS_SOLVER
from support.simulation.drawn_figures import Drawn, figures
from support.simulation.searched import opened

PICTURES = """\
plan test
model   vit("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = 2)
mesh    (dp_shard = 4)
fsdp blocks on dp_shard
precision (param = fp32, reduce = fp32)
"""
BUCKETS = "comm { layers.* = auto }\n"
STYLES = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = 2, seq_len = 128)
mesh    (tp = 4)
shard on tp { layers.*.feed_forward.w2 = auto }
"""
MICRO_BATCHES = 4
COMPUTED = 0.1


class Computed(Drawn):
    """Each candidate takes a second, and computes a tenth of one in each micro batch."""

    def figures(self, analysis: Analysis) -> Outcome:
        return replace(figures(1.0, 1e9), micro_batch=MicroBatchWork(computed=COMPUTED))


def solved(text: str) -> Solution:
    return solve(opened(text), Computed(1))


def test_simulation_bounds_every_bucketing():
    solution = solved(PICTURES + BUCKETS)
    assert solution.result.status == "bounded"
    assert solution.result.bound == pytest.approx(MICRO_BATCHES * COMPUTED)
    assert solution.gap == pytest.approx(1.0 - MICRO_BATCHES * COMPUTED)


@pytest.mark.parametrize("text", [PICTURES + BUCKETS + "compile\n", pytest.param(STYLES, marks=NEEDS_SOLVER)])
def test_what_has_no_bound_leaves_the_gap_unknown(text: str, monkeypatch: pytest.MonkeyPatch):
    """Compiled layers may compute otherwise in other buckets, and layers do in other styles."""
    monkeypatch.setattr(model_layers, "layers_of", lambda manifest, family: iter(()))
    monkeypatch.setattr(BoundsOf, "_on_rank", lambda self, analysis: 0.0)
    solution = solved(text)
    body = document(solution, None)
    assert (body["status"], body["bound"], body["gap"]) == ("bounded", None, None)
    assert terminal(solution).startswith("step_time 1.00 s, no bound is known (no simulated candidate is better)\n")
    assert solution.text(solution.best.choices).splitlines()[-1].endswith("gap unknown")


def test_layers_of_models_without_sequences_take_no_known_time():
    analysis = opened(PICTURES).analysis
    assert analysis is not None
    bounds = BoundsOf()
    assert bounds.layers.of_layers(analysis) == {}
    assert 0.0 < bounds.as_sum(analysis) <= bounds.step_time(analysis)
