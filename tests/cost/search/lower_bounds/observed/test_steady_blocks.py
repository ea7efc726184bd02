"""Bounds from the step time that steady blocks add, for candidates that mix treatments of the same blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from legoai.cost.estimate import Estimate, estimate
from legoai.cost.search.branch_and_bound.probes import Probes, with_one_micro_batch
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.marks import some_slow
from support.simulation.simulator import in_the_simulator

BLOCKS = 24
PLAN = """\
plan steady
model llama3("8b", n_layers = LAYERS, vocab_size = 4096, tie_embeddings = false)
cluster h100_sxm(devices = 64, fabric = infiniband_ndr)
attention flash
batch (global = 128, micro = 1, seq_len = LENGTH)
mesh (dp_replicate = REPLICATE, dp_shard = rest, tp = TP)
shard standard on tp (sequence, loss_parallel)
fsdp blocks on dp_replicate, dp_shard
checkpoint { layers.* = TREATMENT }
loss LOSS
precision (param = bf16, reduce = fp32)
REQUIRE"""
TREATMENTS = (
    "auto in [none, full, selective([attention]), first(9, full), first(9, full, others = selective([attention]))]"
)


def opened(treatment: str = TREATMENTS, **values: object) -> OpenPlan:
    text = PLAN.replace("TREATMENT", treatment)
    defaults = {"LENGTH": 8192, "LAYERS": BLOCKS, "REPLICATE": 1, "TP": 1, "LOSS": "eager", "REQUIRE": ""}
    for name, value in {**defaults, **values}.items():
        text = text.replace(name, str(value))
    if values.get("TP", 1) == 1:
        text = text.replace("shard standard on tp (sequence, loss_parallel)\n", "")
    linted = lint(text, "steady.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def decided(treatment: str, **values: object) -> Analysis:
    [analysis] = [opened(treatment, **values).candidate(()).analysis]
    assert analysis is not None
    return analysis


@functools.cache
def simulated(treatment: str, **values: object) -> tuple[Estimate, Figures]:
    analysis = decided(treatment, **values)
    assert analysis.manifest is not None
    found = estimate(lower(analysis), analysis.plan, analysis.manifest, whole=False)
    return found, Figures.of(found, analysis)


def learn(bounds: BoundsOf, treatment: str, **values: object) -> None:
    _, figures = simulated(treatment, **values)
    bounds.observe(decided(treatment, **values), figures.micro_batch, figures.moved, figures.points)


def per_block(values: dict[str, object]) -> tuple[float, float]:
    """Time that a steady block adds to a step, and that four more blocks add to full simulations, for each."""
    _, figures = simulated("selective([attention])", **values)
    steady = figures.micro_batch.steady
    assert steady is not None
    batches = micro_batches(decided("full", **values).plan)
    assert batches is not None
    times = []
    for layers in (BLOCKS, BLOCKS + 4):
        analysis = decided("selective([attention])", **values, LAYERS=layers)
        assert analysis.manifest is not None
        whole = estimate(lower(analysis), analysis.plan, analysis.manifest)
        model = (one for one in whole.slowest.intervals if getattr(one.record, "phase", "") != "optimizer")
        times.append(max(one.end for one in model))
    return steady.everything.seconds * batches, (times[1] - times[0]) / 4


LONG: tuple[dict[str, object], ...] = ({"TP": 2, "LENGTH": 16384}, {"REPLICATE": 2, "LENGTH": 8192})


@pytest.mark.parametrize("values", some_slow(({}, *LONG), *LONG))
def test_steady_block_time_equals_an_added_simulated_block(values: dict[str, object]) -> None:
    steady, whole = in_the_simulator(per_block, values)
    assert steady == pytest.approx(whole, rel=1e-6)


def of_short_sequences() -> bool:
    """Whether a step of short sequences has steady blocks."""
    _, figures = simulated("full", LENGTH=128)
    return figures.micro_batch.steady is not None


@pytest.mark.slow
def test_host_bound_blocks_are_not_steady() -> None:
    """Another block may leave the device time that they catch up with."""
    assert not in_the_simulator(of_short_sequences)


SEEN = ("none", "full", "selective([attention])")
MIXED = ("first(9, full)", "first(9, full, others = selective([attention]))", "every(3)")


def mixtures(values: dict[str, object], mixed: Sequence[str]) -> list[tuple[str, float, float, float]]:
    """Mixtures of treatments that were observed: their bounds before that and with it, and their simulated times."""
    found = []
    bounds, before = BoundsOf(), BoundsOf()
    for treatment in SEEN:
        learn(bounds, treatment, **values)
    for treatment in (*SEEN, *mixed):
        analysis = decided(treatment, **values)
        least = before(analysis).step_time, bounds(analysis).step_time
        found.append((f"{treatment} {values}", *least, simulated(treatment, **values)[0].step_time))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "mixed"),
    [({}, MIXED), ({"TP": 2, "LENGTH": 16384}, MIXED)],
)
def test_mixed_treatments_are_bounded_by_the_mean_block_time(values: dict[str, object], mixed: Sequence[str]) -> None:
    for name, before, least, simulated_time in in_the_simulator(mixtures, values, mixed):
        assert before < least <= simulated_time, name
        assert least > 0.94 * simulated_time, name


OTHERS: tuple[dict[str, object], ...] = (
    {"REPLICATE": 2},
    {"LOSS": "chunked(4)"},
    {"LOSS": "chunked(4, last_layer = true)"},
    {"REPLICATE": 8},
)


def other_degrees(
    values: dict[str, object], others: Sequence[dict[str, object]]
) -> list[tuple[str, float, float, float]]:
    """Candidates with other data-parallel degrees and losses than the one that was observed."""
    found = []
    bounds, before = BoundsOf(), BoundsOf()
    learn(bounds, "full", **values)
    for other in others:
        analysis = decided("full", **values, **other)
        least = before(analysis).step_time, bounds(analysis).step_time
        found.append((f"{values} {other}", *least, simulated("full", **values, **other)[0].step_time))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "others"),
    [({}, OTHERS), ({"TP": 2}, OTHERS)],
)
def test_observed_blocks_bound_other_data_parallel_degrees(
    values: dict[str, object], others: Sequence[dict[str, object]]
) -> None:
    for name, before, least, simulated_time in in_the_simulator(other_degrees, values, others):
        assert before < least <= simulated_time, name


def beyond_bounds() -> list[tuple[str, float, float, float]]:
    """Treatments whose blocks were observed and others: bounds without and with the shortfalls of steps, and times."""
    found = []
    bounds, before = BoundsOf(), BoundsOf()
    for treatment in SEEN:
        _, figures = simulated(treatment)
        for one in (bounds, before):
            learn(one, treatment)
        bounds.shortfalls.observe(decided(treatment), figures.micro_batch, figures.step_time)
    for treatment in (*SEEN, MIXED[1], "budget(0.5)"):
        analysis = decided(treatment)
        least = before(analysis).step_time, bounds(analysis).step_time
        found.append((treatment, *least, simulated(treatment)[0].step_time))
    return found


@pytest.mark.slow
def test_steps_exceed_their_bounds_by_the_same_time_under_all_treatments() -> None:
    for name, before, least, simulated_time in in_the_simulator(beyond_bounds):
        assert before < least <= simulated_time, name
        if name in (*SEEN, *MIXED):
            assert least > 0.99 * simulated_time, name


def one_treatment_seen() -> tuple[float, float]:
    """The shortfall of a step after one treatment of its blocks was simulated, and after the same once more."""
    bounds = BoundsOf()
    _, figures = simulated("full")
    found = []
    for _ in range(2):
        bounds.shortfalls.observe(decided("full"), figures.micro_batch, figures.step_time)
        found.append(bounds.shortfalls.of(decided("none")))
    return found[0], found[1]


def test_one_treatment_shows_no_shortfall_of_others() -> None:
    assert in_the_simulator(one_treatment_seen) == (0.0, 0.0)


UNSEEN = ("budget(0.5)", "full", "selective([attention, matmul])", "budget(0.75)")


def unseen(values: dict[str, object], treatments: Sequence[str]) -> list[tuple[str, float, float, float]]:
    """Unobserved treatments, with blocks that recompute nothing."""
    found = []
    bounds, before = BoundsOf(), BoundsOf()
    learn(bounds, "none", **values)
    for treatment in treatments:
        analysis = decided(treatment, **values)
        least = before(analysis).step_time, bounds(analysis).step_time
        found.append((f"{treatment} {values}", *least, simulated(treatment, **values)[0].step_time))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "treatments"),
    [({}, UNSEEN), ({"TP": 2}, UNSEEN)],
)
def test_unobserved_treatment_is_bounded_by_blocks_without_recomputation(
    values: dict[str, object], treatments: Sequence[str]
) -> None:
    for name, before, least, simulated_time in in_the_simulator(unseen, values, treatments):
        assert before < least <= simulated_time, name


def taught() -> tuple[list[float], float]:
    """Bounds of an open treatment within limited memory after each lesson, and the time of the fastest that fits."""
    limit = simulated("first(9, full, others = selective([attention]))")[0].peak_active
    plan = opened(REQUIRE=f"require peak_memory <= {limit}B\n")
    [hole] = plan.holes
    everything = [simulated(text)[0] for text in hole.choices[: hole.listed]]
    bounds, found = BoundsOf(), list[float]()
    learn(bounds, "full")
    lessons = Probes(SearchState(plan=plan, costs=Costs(objective_of(None), bounds)))
    while (lesson := lessons.of((None,))) is not None:
        candidate = plan.candidate(lesson).analysis
        assert candidate is not None
        analysis = with_one_micro_batch(candidate)
        assert analysis.manifest is not None
        figures = Figures.of(estimate(lower(analysis), analysis.plan, analysis.manifest, whole=False), analysis)
        bounds.observe(analysis, figures.micro_batch, figures.moved, figures.points)
        open_plan = plan.candidate((None,)).analysis
        assert open_plan is not None
        found.append(bounds(open_plan).step_time)
    return found, min(one.step_time for one in everything if one.peak_active <= limit)


@pytest.mark.slow
def test_deciding_treatments_are_simulated_to_tighten_a_bound() -> None:
    bounds, fastest = in_the_simulator(taught)
    assert 1 <= len(bounds) <= 2
    assert bounds == sorted(bounds)
    assert 0.95 * fastest < bounds[-1] <= fastest


def test_blocks_of_which_nothing_is_known_are_observed_under_one_treatment_first() -> None:
    plan = opened("auto in [none, full]", TP="auto in [1, 2]")
    tp, treatment = (next(i for i, hole in enumerate(plan.holes) if word in hole.what) for word in ("tp", "checkpoint"))
    state = SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf()))
    probes, ways = Probes(state), [[0, 0], [0, 1], [1, 1]]
    one, other, apart = (tuple(way if tp < treatment else reversed(way)) for way in ways)
    assert probes.of(one) == one
    assert probes.awaited(other, {one}) and not probes.awaited(other, set())
    assert probes.of(other) is None
    assert not probes.awaited(apart, {one}) and probes.of(apart) == apart
