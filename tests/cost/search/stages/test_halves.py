"""Bounds of split backward passes, which recompute more than whole ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import Bounds, BoundsOf
from legoai.cost.search.lower_bounds.recomputation import by_second_half
from legoai.cost.search.stages.block_bytes import recomputed_by_ranks
from legoai.cost.search.stages.costs import work_of_stages
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.stages.pipeline import first_modules
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan test
model llama3("1b", n_layers = 4, tie_embeddings = false)
cluster h100_sxm(devices = 4)
attention flash
batch (global = {sequences}, micro = 2, seq_len = {length})
mesh (pp = 2, dp_shard = 2)
fsdp blocks on dp_shard {{ layers.* = unit(reshard = after_backward) }}
pipeline on pp (schedule = {schedule})
checkpoint {{ layers.* = {treatment} }}
{more}
"""


def analysed(schedule: str, treatment: str, more: str = "", *, sequences: int = 8, length: int = 4096) -> Analysis:
    text = PLAN.format(schedule=schedule, treatment=treatment, more=more, sequences=sequences, length=length)
    linted = lint(text, "test.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    return linted.analysis


def halves(schedule: str, treatment: str) -> tuple[list[dict[str, float]], dict[str, float], Bounds, Bounds]:
    """Least seconds of the halves of each stage, those that are simulated, and the bounds and the truth of a step."""
    analysis, bounds = analysed(schedule, treatment), BoundsOf()
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    assert analysis.manifest is not None
    actions = work_of_stages(found, analysis.manifest).actions
    stages = bounds.stages.of_stages(analysis, first_modules(analysis), 4, halves=True)
    said = [{"I": one.of_inputs, "W": one.of_weights} for one in stages]
    return said, dict(actions), bounds(analysis), Bounds(step_time=found.step_time, memory=found.peak_active)


@pytest.mark.parametrize(
    ("schedule", "treatment"),
    [
        ("ZBVZeroBubble", "full"),
        pytest.param("ZBVZeroBubble", "none", marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", "full", marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", "every(2)", marks=pytest.mark.slow),
    ],
)
def test_backward_halves_take_no_less_than_their_bounds(schedule: str, treatment: str):
    said, simulated, bound, step = in_the_simulator(halves, schedule, treatment)
    for stage, took in enumerate(said):
        for kind, seconds in took.items():
            assert seconds <= simulated.get(f"{stage}{kind}", 0.0)
    # All of the first stage's backward is in its second half.
    assert said[0]["I"] == 0.0 < 0.4 * simulated["0W"] < said[0]["W"]
    assert all(0.4 * simulated[f"{stage}{kind}"] < said[stage][kind] for stage in (1, 2, 3) for kind in "IW")
    assert 0.3 * step.step_time < bound.step_time <= step.step_time
    assert 0.2 * step.memory < bound.memory <= step.memory


def test_saved_gradients_of_second_halves_reduce_the_room():
    """The last rank of two has two micro batches between the halves of their backward, the first one has one."""
    more = "loss chunked(16)\nrequire peak_memory <= 8GiB"
    analysis = analysed("InterleavedZeroBubble", "auto", more, sequences=32, length=16384)
    block = BoundsOf().recomputation.of_block(analysis)
    assert block.halved == sum((2048, 512, 512, 2048, 8192, 8192, 2048)) * 2 * 16384 * 2
    first, last = recomputed_by_ranks(analysis, block)
    none_first, none_last = recomputed_by_ranks(analysis, dataclasses.replace(block, halved=0.0))
    assert none_first <= first < last > none_last


def test_block_is_recomputed_once_in_each_half():
    analysis, bounds = analysed("ZBVZeroBubble", "full"), BoundsOf()
    once = bounds._again(analysis)
    assert once and by_second_half(analysis, once) == once
    apart, together = (
        BoundsOf()(analysed(schedule, "full", sequences=64)) for schedule in ("ZBVZeroBubble", "Interleaved1F1B")
    )
    assert apart.step_time > together.step_time


def test_split_backward_recomputes_full_blocks():
    """Selective treatments cannot be combined with such a schedule, so that a memory limit costs far more."""

    def slower(schedule: str) -> float:
        short, ample = (
            analysed(
                schedule, "auto", f"loss chunked(16)\nrequire peak_memory <= {limit}GiB", sequences=32, length=16384
            )
            for limit in (12, 70)
        )
        return BoundsOf()(short).step_time / BoundsOf()(ample).step_time - 1.0

    assert 0.0 < 3.0 * slower("Interleaved1F1B") < slower("ZBVZeroBubble")
