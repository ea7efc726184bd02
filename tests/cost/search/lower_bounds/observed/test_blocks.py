"""Bounds from observed blocks, for candidates that share these blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from legoai.cost.estimate import Estimate, estimate
from legoai.cost.search.branch_and_bound.probes import Probes, with_one_micro_batch
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.lower_bounds.observed.blocks import ObservedBlocks, block_key
from legoai.cost.search.lower_bounds.open_holes.treatments import open_treatments
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan small
model llama3("1b", n_layers = LAYERS, vocab_size = 2048, tie_embeddings = false)
cluster h100_sxm(devices = DEVICES)
attention flash
batch (global = 16, micro = auto in [1, 2], seq_len = 2048)
mesh (pp = auto in [1, 2], dp_shard = rest, tp = auto in [1, 2])
shard standard on tp (sequence, loss_parallel)
fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward]) }
pipeline on pp (schedule = auto in [1F1B, ZBVZeroBubble])
checkpoint { layers.* = TREATMENTS }
loss auto in [eager, chunked(4)]
precision (param = bf16, reduce = fp32)
REQUIRE"""
NAMES = ("micro", "pp", "tp", "reshard", "schedule", "treatment", "loss")


def opened(treatments: str, *, layers: int = 4, devices: int = 8, require: str = "") -> OpenPlan:
    text = PLAN.replace("DEVICES", str(devices)).replace("TREATMENTS", treatments).replace("REQUIRE", require)
    text = text.replace("LAYERS", str(layers))
    linted = lint(text, "small.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def chosen(plan: OpenPlan, **answers: str) -> tuple[int | None, ...]:
    """Choices by a word in the name of a hole; None for the others."""
    found = []
    for hole in plan.holes:
        name = next((one for one in NAMES if one in hole.what.split()), "treatment")
        found.append(hole.choices.index(answers[name]) if name in answers else None)
    return tuple(found)


def analysed(plan: OpenPlan, choices: tuple[int | None, ...]) -> Analysis:
    candidate = plan.candidate(choices)
    assert candidate.analysis is not None
    assert not candidate.errors
    return candidate.analysis


def simulated(analysis: Analysis) -> tuple[Estimate, Figures]:
    assert analysis.manifest is not None
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    return found, Figures.of(found, analysis)


def learn(bounds: BoundsOf, analysis: Analysis) -> Figures:
    _, figures = simulated(analysis)
    bounds.observe(analysis, figures.micro_batch, figures.moved, figures.points)
    return figures


BASE = {"micro": "1", "pp": "1", "tp": "2", "reshard": "after_forward", "schedule": "1F1B", "loss": "eager"}
TREATMENTS = "auto in [none, full, budget(0.5)]"
OTHERS = (
    {"loss": "chunked(4)", "reshard": "after_backward"},
    {"pp": "2"},
    {"pp": "2", "schedule": "ZBVZeroBubble", "reshard": "after_backward"},
)


def others(some: Sequence[dict[str, str]]) -> list[str]:
    """Candidates whose bound does not rise by observed blocks, or rises above the simulation."""
    plan, wrong = opened(TREATMENTS), []
    bounds, before = BoundsOf(), BoundsOf()
    base = analysed(plan, chosen(plan, **BASE, treatment="budget(0.5)"))
    learn(bounds, base)
    for other in some:
        answers = {**BASE, **other}
        choices = chosen(plan, **answers, treatment="budget(0.5)")
        if answers["schedule"] == "ZBVZeroBubble":  # budgets cannot be combined with two passes backward
            choices = chosen(plan, **answers, treatment="none")
        analysis = analysed(plan, choices)
        assert block_key(analysis) == block_key(base)
        found, _ = simulated(analysis)
        least, without = bounds(analysis), before(analysis)
        if not without.step_time < least.step_time <= found.step_time:
            wrong.append(f"{other}: {least.step_time} s, {without.step_time} before, {found.step_time} simulated")
        if not without.memory <= least.memory <= found.peak_active:
            wrong.append(f"{other}: {least.memory} B, {without.memory} before, {found.peak_active} simulated")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("some", [OTHERS[::2], OTHERS[1:2]])
def test_observed_block_bounds_other_losses_units_and_stages(some: Sequence[dict[str, str]]):
    assert in_the_simulator(others, some) == []


def mixtures() -> list[str]:
    """Bounds of an open treatment under memory limits, and the fastest mixture that fits."""
    treatments = ("none", "full", "budget(0.5)")
    mixed = ("first(2, full)", "first(2, full, others = budget(0.5))")
    listed = f"auto in [{', '.join([*treatments, *mixed])}]"
    plan, wrong = opened(listed, devices=2), []
    answers = {**BASE, "tp": "1"}
    costs, lessons = [], []
    for treatment in (*treatments, *mixed):
        analysis = analysed(plan, chosen(plan, **answers, treatment=treatment))
        found, figures = simulated(analysis)
        costs.append((found.step_time, found.peak_active))
        if treatment in treatments:
            lessons.append((analysis, figures))
    for limit in sorted({peak for _, peak in costs}, reverse=True)[1:]:
        limited = opened(listed, devices=2, require=f"require peak_memory <= {limit}B\n")
        bounds = BoundsOf()
        for analysis, figures in lessons:
            bounds.observe(analysis, figures.micro_batch, figures.moved, figures.points)
        left_open = analysed(limited, chosen(limited, **answers))
        assert len(open_treatments(left_open)) == len(treatments)
        least, without = bounds(left_open).step_time, BoundsOf()(left_open).step_time
        fastest = min(seconds for seconds, peak in costs if peak <= limit)
        if not without < least <= fastest:
            wrong.append(f"{limit} B: {least} s, {without} s without lessons, {fastest} s in a simulation")
    return wrong


@pytest.mark.slow
def test_hull_of_observed_treatments_bounds_every_mixture():
    assert in_the_simulator(mixtures) == []


def test_block_key_depends_on_deciding_statements_only():
    plan = opened("auto")
    base = block_key(analysed(plan, chosen(plan, **BASE, treatment="none")))
    assert base is not None
    for other in OTHERS:
        assert block_key(analysed(plan, chosen(plan, **{**BASE, **other}, treatment="full"))) == base
    for other in ({"micro": "2"}, {"tp": "1"}):
        assert block_key(analysed(plan, chosen(plan, **{**BASE, **other}, treatment="none"))) != base
    # Open holes of other statements do not affect the key.
    assert block_key(analysed(plan, chosen(plan, micro="1", pp="1", tp="2"))) == base
    assert block_key(analysed(plan, chosen(plan, pp="1", tp="2"))) is None


def test_probe_has_no_pipeline_and_runs_once():
    plan, bounds = opened("auto"), BoundsOf()
    state = SearchState(plan=plan, costs=Costs(objective_of(None), bounds))
    lessons = Probes(state)
    wanted = chosen(plan, micro="2", pp="2", tp="2")
    lesson = lessons.of(wanted)
    assert lesson is not None
    assert None not in lesson
    candidate = plan.candidate(lesson)
    assert not candidate.errors
    assert candidate.plan.pipeline is None
    assert (candidate.plan.batch.micro_batch, candidate.plan.mesh.tp) == (2, 2)
    assert lessons.of(wanted) is None
    # The treatment of a candidate that leaves nothing open is kept.
    whole = chosen(plan, **{**BASE, "pp": "2"}, treatment="full")
    other = lessons.of(whole)
    assert other is not None
    assert plan.candidate(other).plan.checkpoint == plan.candidate(whole).plan.checkpoint
    # Where micro batches are too large for ranks without a pipeline, there is none.
    assert Probes(state).of(chosen(plan, pp="2", tp="2")) is None


def one_and_all(treatment: str) -> tuple[Figures, Figures]:
    """Return the figures of one micro batch and those of a whole step."""
    plan = opened(TREATMENTS, layers=8)
    analysis = analysed(plan, chosen(plan, **BASE, treatment=treatment))
    short = with_one_micro_batch(analysis)
    assert micro_batches(short.plan) == 1 < (micro_batches(analysis.plan) or 0)
    assert block_key(short) == block_key(analysis)
    return simulated(short)[1], simulated(analysis)[1]


@pytest.mark.slow
@pytest.mark.parametrize("treatment", ["none", "full", "budget(0.5)"])
def test_one_micro_batch_gives_the_block_figures_of_a_step(treatment: str):
    one, all_of = in_the_simulator(one_and_all, treatment)
    seen, known = one.micro_batch, all_of.micro_batch
    assert seen.in_blocks is not None and known.in_blocks is not None
    assert seen.in_blocks == pytest.approx(known.in_blocks, rel=1e-9)
    assert seen.computed == pytest.approx(known.computed, rel=1e-9)
    # The first micro batch makes the gradients, which stay.
    assert one.points.released <= all_of.points.released


@pytest.mark.parametrize("answers", [{}, {"pp": "2"}])
def test_figures_without_times_or_with_pipeline_are_not_observed(answers: dict[str, str]):
    plan, bounds, seen = opened("auto"), BoundsOf(), ObservedBlocks()
    analysis = analysed(plan, chosen(plan, **{**BASE, **answers}, treatment="none"))
    figures = Figures(
        metrics={}, fits=None, compute=0.0, recompute=0.0, exposed={}, waiting=0.0, bubble=0.0, profile=""
    )
    seen.observe(analysis, figures.micro_batch, 0.0)
    assert seen.revision == 0
    assert seen.of(analysis) is None
    assert (seen.unobserved(analysis) is None) == (not answers and block_key(analysis) is None)
    assert bounds.layers.observed.version(analysis) == (None, 0)
