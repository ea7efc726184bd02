"""Bounds from the memory traffic of observed blocks, for candidates with other degrees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.memory_bound_kernels import Moved, moved_of, seconds_of_block
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork
from legoai.cost.search.memory.points import MemoryPoints
from legoai.cost.trace.trace import records_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan small

model   llama3("1b", n_layers = 3)
cluster h100_sxm(hosts = 1, devices = {devices}, fabric = infiniband_ndr)
batch   (global = 64, micro = {micro}, seq_len = 2048)
mesh    ({mesh})
{body}precision (param = bf16, reduce = fp32)
optimizer adamw(lr = 1.5e-4)
"""
SHARDED = "fsdp on dp_shard { layers.* = unit(reshard = after_forward), root = unit }\n"
STYLES = "shard standard on tp (sequence, loss_parallel)\n"


def analysed(text: str) -> Analysis:
    linted = lint(text, "small.plan", directory=Path())
    assert linted.analysis is not None, linted.diagnostics
    return linted.analysis


def simulated(text: str) -> tuple[float, list[Moved]]:
    """Seconds of a step, and the memory traffic of its blocks."""
    analysis = analysed(text)
    estimated = estimate(lower(analysis), analysis.plan, analysis.manifest)
    moved = moved_of(estimated, analysis)
    # The traffic of all records equals that of the segments, each of which is read once.
    [rank] = estimated.ranks
    assert rank.trace.segmented
    one_by_one = dataclasses.replace(rank.trace, items=tuple(records_of(rank.trace.items)))
    alone = dataclasses.replace(estimated, ranks=(dataclasses.replace(rank, trace=one_by_one),))
    assert moved == moved_of(alone, analysis)
    return estimated.metric("step_time", "seconds"), moved


@pytest.fixture(scope="module")
def observed():
    """A plan on one rank, its seconds and its bound, and bounds with the memory traffic of its blocks."""
    text = PLAN.format(devices=1, micro=2, mesh="dp_shard = 1", body=SHARDED)
    seconds, moved = in_the_simulator(simulated, text)
    analysis, bounds = analysed(text), BoundsOf()
    before = bounds(analysis).step_time
    bounds.observe(analysis, MicroBatchWork(), moved, MemoryPoints())
    return analysis, seconds, before, bounds, moved


@pytest.mark.slow
def test_observed_memory_traffic_raises_a_valid_bound(observed):
    analysis, seconds, before, bounds, moved = observed
    assert moved
    assert before < bounds(analysis).step_time < seconds
    took = seconds_of_block(moved, analysis, bounds.machine(analysis).profile)
    batches, blocks = 32, 3
    assert bounds(analysis).step_time == pytest.approx(before + batches * blocks * sum(took.once), rel=1e-6)


@pytest.mark.parametrize(
    ("devices", "micro", "mesh", "body"),
    [
        pytest.param(4, 4, "dp_shard = 4", SHARDED, marks=pytest.mark.slow),
        pytest.param(4, 1, "dp_shard = 2, tp = 2", STYLES + SHARDED, marks=pytest.mark.slow),
        (2, 2, "dp_shard = 1, cp = 2", "context on cp\n" + SHARDED),
    ],
)
def test_bound_holds_for_other_degrees_and_micro_batches(observed, devices: int, micro: int, mesh: str, body: str):
    bounds = observed[3]
    text = PLAN.format(devices=devices, micro=micro, mesh=mesh, body=body)
    seconds, _ = in_the_simulator(simulated, text)
    analysis = analysed(text)
    assert BoundsOf()(analysis).step_time < bounds(analysis).step_time < seconds


def test_gradients_summed_in_products_move_no_bytes(observed):
    """Two sums of the attention's three layers and one of the feed-forward's two, of 2048 features on two ranks."""
    _, _, _, bounds, moved = observed
    plain, hidden = (
        analysed(PLAN.format(devices=4, micro=1, mesh="dp_shard = 2, tp = 2", body=styles + SHARDED))
        for styles in (STYLES, STYLES.replace("loss_parallel", "loss_parallel, overlap"))
    )
    profile = bounds.machine(plain).profile
    more, less = (seconds_of_block(moved, one, profile).once.backward for one in (plain, hidden))
    sums = Moved("backward", "elementwise", "", "bf16", 3 * 2048 * 2.0, 3)
    assert more - less == pytest.approx(seconds_of_block([sums], plain, profile).once.backward)
    assert less > 0.5 * more
