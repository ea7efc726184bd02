"""Bounds for an open schedule hold for each of torch's schedules."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.stages.action_graph import graph_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE, V_SHAPED

PLAN = """\
plan test
model llama3("1b", n_layers = {layers})
cluster h100_sxm(devices = {ranks})
batch (global = {batches}, micro = 1, seq_len = {length})
mesh (pp = {ranks}, dp_shard = 1)
pipeline on pp (schedule = {schedule})
{more}
"""


def analysed(
    ranks: int, batches: int, schedule: str, more: str = "", *, length: int = 512, layers: int = 16
) -> Analysis:
    text = PLAN.format(ranks=ranks, batches=batches, schedule=schedule, more=more, length=length, layers=layers)
    analysis = lint(text, "test.plan", directory=Path()).analysis
    assert analysis is not None
    return analysis


@pytest.mark.parametrize(("schedule", "ranks"), list(itertools.product(SINGLE_STAGE + MULTI_STAGE, (2, 4))))
def test_held_micro_batches_bound_every_schedule(schedule: str, ranks: int):
    stages = 1 if schedule in SINGLE_STAGE else 2
    for batches in (ranks, ranks + 1, 2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks, 7 * ranks):
        try:
            graph = graph_of(analysed(ranks, batches, schedule))
        except ValueError:
            continue  # torch has no such order
        assert graph is not None
        moments = graph.held[-1 if schedule in V_SHAPED else 0]
        each = [(min(one.micro_batches.values()), len(one.summed)) for one in moments if one.micro_batches]
        most = max(count for count, _ in each)
        summed = max((count for count, having in each if having == stages), default=0)
        if schedule == "LoopedBFS":
            assert most >= batches
        elif stages == 1:
            assert summed >= min(ranks, batches - 1)
        else:
            assert most >= ranks
            if batches >= (ranks + 1 if schedule in V_SHAPED else 2 * ranks):
                assert summed >= ranks


@pytest.mark.parametrize("layers", [13, 16])
def test_open_schedule_bound_is_below_every_schedule(layers: int):
    bounds = BoundsOf()
    whatever = bounds(analysed(4, 8, "auto", layers=layers))
    each = [bounds(analysed(4, 8, one, layers=layers)) for one in SINGLE_STAGE + MULTI_STAGE]
    assert 0.85 * min(one.step_time for one in each) < whatever.step_time <= min(one.step_time for one in each)
    assert whatever.memory <= min(one.memory for one in each)


def test_output_layer_counts_in_the_last_stage():
    """Its products are a twelfth of the whole model's, and all of them one rank's."""
    seconds = BoundsOf().layers.of_layers(analysed(4, 32, "auto"))
    whole = 32 * sum(one.forward + one.backward for one in seconds.values())
    assert BoundsOf()(analysed(4, 32, "auto")).step_time > 1.15 * whole / 4


def test_memory_limit_adds_recomputation_for_an_open_schedule():
    free = BoundsOf()(analysed(4, 16, "auto", length=8192)).step_time
    limited = BoundsOf()(analysed(4, 16, "auto", "require peak_memory <= 12GiB", length=8192)).step_time
    assert limited > 1.05 * free


@pytest.mark.parametrize(("schedule", "least"), [("ZBVZeroBubble", 1.01), ("Interleaved1F1B", 1.001)])
def test_uneven_stages_count_their_own_blocks(schedule: str, least: float):
    """Twelve blocks on eight stages: a stage of one has room for what a rank with three blocks must recompute."""
    more, room = "checkpoint { layers.* = auto }", "\nrequire peak_memory <= 8GiB"
    free = BoundsOf()(analysed(4, 16, schedule, more, length=8192, layers=12)).step_time
    limited = BoundsOf()(analysed(4, 16, schedule, more + room, length=8192, layers=12)).step_time
    assert limited > least * free
