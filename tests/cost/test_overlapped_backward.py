"""Column-wise layers that hide their communication in backward, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import Estimate, estimate
from legoai.cost.search.candidate_bounds.bounds import Bounds, BoundsOf
from legoai.cost.timing.breakdown import collective_costs
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

LAYERS, TP, TOKENS, DIM = 3, 8, 16384, 4096
PLAN = f"""\
plan test
model llama3("8b", n_layers = {LAYERS})
cluster h100_sxm
batch (global = 2, micro = 1, seq_len = {TOKENS})
mesh (tp = {TP})
attention flash
precision (master = bf16, param = bf16)
shard standard on tp (sequence, loss_parallel) {{
OVERLAP
}}
"""
OVERLAP = """
  layers.*.{attention, feed_forward} = inputs(from = shard(1), to = replicate, overlap = backward)
  output = colwise(input = shard(1), overlap = backward, loss_parallel = true)
"""
GATHERED = TOKENS * DIM * 2


def analysis_of(text: str) -> Analysis:
    linted = lint(text, "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return linted.analysis


def bound_and_cost(text: str) -> tuple[Bounds, Estimate]:
    analysis = analysis_of(text)
    return BoundsOf()(analysis), estimate(lower(analysis), analysis.plan, analysis.manifest)


def costs(overlap: str) -> Estimate:
    analysis = analysis_of(PLAN.replace("OVERLAP", overlap))
    return estimate(lower(analysis), analysis.plan, analysis.manifest)


@pytest.fixture(scope="module")
def plain() -> Estimate:
    return in_the_simulator(costs, "")


@pytest.fixture(scope="module")
def overlapped() -> Estimate:
    return in_the_simulator(costs, OVERLAP)


def backward_of(found: Estimate, kind: str, pattern: str) -> tuple[int, float, float]:
    """Number of collectives of a module in backward, their seconds, and their exposed seconds."""
    return next(
        (each.count, each.seconds, each.exposed)
        for each in collective_costs(found.ranks[0].intervals)
        if (each.kind, each.pattern, each.phase) == (kind, pattern, "backward")
    )


@pytest.mark.slow
def test_input_gradient_reduction_overlaps_weight_gradients(plain, overlapped):
    for module in ("layers.*.attention", "layers.*.feed_forward", "output"):
        count, seconds, exposed = backward_of(plain, "reduce_scatter", module)
        assert exposed == pytest.approx(seconds)
        again, hidden, left = backward_of(overlapped, "reduce_scatter", module)
        assert (again, hidden) == (count, pytest.approx(seconds))
        assert left < (0.25 if module == "layers.*.attention" else 0.01) * hidden  # its products are shorter than a sum
    assert overlapped.step_time < plain.step_time


def test_input_gather_overlaps_input_gradients(plain, overlapped):
    count, seconds, exposed = backward_of(overlapped, "all_gather", "output")
    assert count == 2
    assert exposed < 0.01 * seconds
    for module in ("layers.*.attention", "layers.*.feed_forward"):
        # That of the row-wise layer behind is one of two, and is waited for in both plans.
        count, seconds, exposed = backward_of(plain, "all_gather", module)
        assert exposed == pytest.approx(seconds)
        twice, all_seconds, left = backward_of(overlapped, "all_gather", module)
        assert (twice, all_seconds) == (2 * count, pytest.approx(2 * seconds))
        assert left < 1.01 * seconds


def test_gathered_inputs_are_freed_after_forward(plain, overlapped):
    """At the peak, in the loss, each module of a block and the output layer holds a piece, not the whole."""
    kept = (2 * LAYERS + 1) * (GATHERED - GATHERED // TP)
    assert plain.peak_active - overlapped.peak_active == kept


def test_overlap_keeps_the_products(plain, overlapped):
    def products(found: Estimate) -> float:
        return found.ranks[0].breakdown.by_kind["matrix product"] - found.ranks[0].breakdown.slowed

    # Gradients of an input are added up in the products, which read the sum.
    assert products(overlapped) == pytest.approx(products(plain), rel=0.02)


@pytest.mark.slow
def test_lower_bounds_exclude_hidden_communication_and_freed_memory():
    deep = PLAN.replace(f"n_layers = {LAYERS}", "n_layers = 16").replace("OVERLAP", OVERLAP)
    bound, found = in_the_simulator(bound_and_cost, deep)
    assert 0.0 < bound.step_time < found.step_time
    assert 0.7 * found.peak_active < bound.memory < found.peak_active
