"""Joint answers of the holes that decide memory, against brute force over all divisions of the blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from legoai.cost.search.branch_and_bound import mixtures, tree
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices, evaluated
from legoai.cost.search.evaluation.evaluator import Figures, Outcome
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork
from legoai.cost.search.memory.points import MemoryPoints
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.solve import Solution, solve
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.reporting.reference import value_text
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.require import METRICS
from support.marks import NEEDS_SOLVER, some_slow
from support.simulation.drawn_figures import KEPT

BLOCKS = 8
GIB = 2**30
TEXT = f"""\
plan test
model   llama3("tiny", n_layers = {BLOCKS})
cluster cpu(devices = 4)
batch   (global = 32, micro = 2, seq_len = 128)
mesh    (dp_shard = 4)
fsdp on dp_shard {{ layers.* = auto }}
checkpoint {{ layers.* = auto }}
offload (optimizer = auto)
precision (param = fp32, reduce = fp32)
"""
UNITS = {"after_forward": (0, 0.0, 0), "after_backward": (4, -0.9, 0), "never": (4, -1.6, 4)}
"""GiB that a block holds unsharded to its backward, seconds that it saves, and GiB that stay behind its backward."""
STATE, COPIES = 10, 6.0
"""GiB of optimizer state, and seconds to copy them."""


DISTINCT = 6
"""Blocks that can be distinguished where they are simulated, at least."""

OFFLOADED, COPIED = 0.25, 0.4
"""Share of what a block keeps that stays where activations are offloaded, and seconds for each GiB of it."""


def step(
    blocks: Sequence[tuple[str, str]], *, offloaded: bool, copied: bool = False
) -> tuple[float, float, MemoryPoints]:
    """Seconds, bytes at the peak and the points of a step, block by block."""
    kept = sum(KEPT[one][0] for one, _ in blocks)
    held = [KEPT[one][0] * (OFFLOADED if copied else 1) + UNITS[unit][0] for one, unit in blocks]
    stays = [UNITS[unit][2] for _, unit in blocks]
    state = 0 if offloaded else STATE
    turn = 20 + state + sum(held)
    inside = [
        15 + state + sum(held[: place + 1]) + sum(stays[place + 1 :]) + (9 if blocks[place][0] == "full" else 3)
        for place in range(len(blocks))
    ]
    optimizer = 12 + STATE + sum(stays)
    seconds = 1000.0 + sum(KEPT[one][1] + UNITS[unit][1] for one, unit in blocks) + COPIES * offloaded
    seconds += COPIED * kept * copied
    peak = max(turn, inside[-1])
    points = MemoryPoints(
        blocks=len(blocks) if len(set(blocks)) == 1 and not offloaded and len(blocks) >= DISTINCT else 0,
        peak=GIB * peak,
        released=GIB * (held[-1] - stays[-1]),
        inside=GIB * inside[-1],
        optimizer=GIB * optimizer,
    )
    return seconds, GIB * max(turn, *inside, optimizer), points


class Formula:
    """An evaluator whose figures follow from the treatment of each block."""

    simulated = 0

    def begin_likely(self, candidates: Sequence[Analysis]) -> None:
        """Formulas take no time."""

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        for analysis in candidates:
            yield self.figures(analysis)

    def figures(self, analysis: Analysis) -> Figures:
        rules, units = recomputed_modules(analysis), fsdp_units(analysis)
        blocks = []
        for path in (path for item in analysis.manifest.block_lists for path in item.paths):
            rule, unit = rules.get(path), units.get(path)
            treatment = "none" if rule is None else value_text(rule.treatment, Checkpoint.treatments)
            blocks.append((treatment, "after_forward" if unit is None else unit.reshard))
        offload = analysis.plan.offload
        offloaded = offload is not None and offload.optimizer == "all"
        copied = offload is not None and offload.activations == "all"
        seconds, peak, points = step(blocks, offloaded=offloaded, copied=copied)
        metrics = {f"{name} {dimension}": 0.0 for name, metric in METRICS.items() for dimension in metric.dimensions}
        metrics |= {"step_time seconds": seconds, "peak_memory bytes": peak, "reserved_memory bytes": peak + GIB}
        metrics |= {"mfu fraction": 100.0 / seconds, "tokens_per_s number": 5000.0 / seconds}
        return Figures(
            metrics=metrics, fits=True, compute=seconds, recompute=0.0, exposed={}, waiting=0.0, bubble=0.0,
            profile="cpu@0123456789ab", points=points, micro_batch=MicroBatchWork(computed=1e-9),
        )  # fmt: skip


def solution(text: str) -> Solution:
    linted = lint(text, "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return solve(OpenPlan(linted, directory=Path()), Formula())


def brute_force(
    room: float,
    activations: Sequence[bool] = (False,),
    units: Sequence[str] = tuple(UNITS),
    optimizer: Sequence[bool] = (False, True),
    blocks: int = BLOCKS,
) -> float:
    """Least seconds of all that a plan can write."""

    def rules(known: Sequence[str]) -> Iterator[list[str]]:
        yield from ([one] * blocks for one in known)
        for first, others in itertools.permutations(known, 2):
            yield from ([first] * some + [others] * (blocks - some) for some in range(1, blocks))

    least = float("inf")
    treatments = [one for one in KEPT if not one.startswith("every")]
    for checkpoint, unit in itertools.product(list(rules(treatments)), list(rules(units))):
        for offloaded, copied in itertools.product(optimizer, activations):
            seconds, peak, _ = step(list(zip(checkpoint, unit, strict=True)), offloaded=offloaded, copied=copied)
            if peak <= room:
                least = min(least, seconds)
    return least


@NEEDS_SOLVER
@pytest.mark.parametrize("room", some_slow((55, 90, 171), 55, 90))
def test_joint_memory_search_equals_brute_force(room: int):
    found = solution(f"{TEXT}require peak_memory <= {room}GiB\n")
    assert found.best is not None
    assert found.value == pytest.approx(brute_force(room * GIB))
    assert found.result.status == "bounded"
    counted = sum(found.result.refused.values()) + found.result.bounded
    assert found.result.total == counted + len(found.result.evaluated) + len(found.result.failed)
    answers = found.joint
    assert answers is not None and answers.program is not None and answers.program.found is not None
    assert answers.program.predicted == pytest.approx(answers.program.found.figures.step_time)
    written = found.text(found.best.choices, pinned=True)
    assert not lint(written, "test.plan", directory=Path()).has_errors


@pytest.mark.slow
@NEEDS_SOLVER
@pytest.mark.parametrize(("room", "copied"), [(44, "all"), (171, "none")])
def test_activation_offload_is_a_joint_choice(room: int, copied: str):
    text = TEXT.replace("(optimizer = auto)", "(optimizer = auto, activations = auto)")
    found = solution(f"{text}require peak_memory <= {room}GiB\n")
    assert found.best is not None
    assert found.value == pytest.approx(brute_force(room * GIB, (False, True)))
    words = {
        hole.what: hole.choices[index or 0] for hole, index in zip(found.plan.holes, found.best.choices, strict=True)
    }
    assert words["offload activations"] == copied


ALIKE = TEXT.replace("fsdp on dp_shard { layers.* = auto }", "fsdp blocks on dp_shard").replace(
    "offload (optimizer = auto)\n", ""
)
"""With nothing open but the treatment of blocks."""


class Recomputing(Formula):
    """Figures with the share of recomputation, in seconds of the step without any."""

    def figures(self, analysis: Analysis) -> Figures:
        figures = super().figures(analysis)
        share = {"recompute fraction": (figures.step_time - 1000.0) / 1000.0}
        return replace(figures, metrics={**figures.metrics, **share})


def recomputing(lines: str, blocks: int = BLOCKS) -> Solution:
    linted = lint(f"{ALIKE}{lines}".replace(f"n_layers = {BLOCKS}", f"n_layers = {blocks}"), "t.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return solve(OpenPlan(linted, directory=Path()), Recomputing())


@NEEDS_SOLVER
@pytest.mark.parametrize("other", some_slow(["recompute <= 3%", "step_time <= 1030s"], "step_time <= 1030s"))
def test_divisions_meet_requirements_that_no_listed_value_meets(other: str):
    """With 91 GiB the listed values take 1033.6 s and more, and the best division 1028.4 s."""
    found = recomputing(f"require peak_memory <= 91GiB\nrequire {other}\n")
    assert found.value == pytest.approx(brute_force(91 * GIB, units=["after_forward"], optimizer=[False]))
    listed = JointMemory(found.plan).holes.are_listed
    assert not any(item.feasible and listed(item.choices) for item in found.result.evaluated)
    assert not found.diagnostics


@NEEDS_SOLVER
@pytest.mark.parametrize(
    ("blocks", "lines"),
    [
        pytest.param(4, "", marks=pytest.mark.slow),
        (3, ""),
        pytest.param(4, "require step_time <= 1016.5s\n", marks=pytest.mark.slow),
    ],
)
def test_few_blocks_are_divided_by_the_mean_of_their_treatments(blocks: int, lines: str):
    """They cannot be distinguished in a trace, so that there is no program; the bound covers all divisions."""
    found = recomputing(f"require peak_memory <= 58GiB\n{lines}", blocks)
    least = brute_force(58 * GIB, units=["after_forward"], optimizer=[False], blocks=blocks)
    assert found.value == pytest.approx(least)
    assert found.best is not None and found.result.bound is not None
    assert not found.plan.holes[0].choices[found.best.choices[0] or 0].startswith(tuple(KEPT))
    assert found.result.bound <= least and found.result.status == "bounded"
    assert found.joint is None


@NEEDS_SOLVER
@pytest.mark.parametrize(("blocks", "room"), [(4, 58), pytest.param(BLOCKS, 91, marks=pytest.mark.slow)])
def test_blocks_of_two_lists_are_divided_as_those_of_one(blocks: int, room: int):
    halves = f"first = {blocks // 2}, second = {blocks - blocks // 2}"
    text = ALIKE.replace(
        f'llama3("tiny", n_layers = {BLOCKS})', f'python("support.models.factories:build_in_two_lists", {halves})'
    ).replace("fsdp blocks on dp_shard", "fsdp on dp_shard { *.* = unit, root = unit }")
    found = solution(f"{text.replace('layers.*', '{blocks,others}.*')}require peak_memory <= {room}GiB\n")
    least = brute_force(room * GIB, units=["after_forward"], optimizer=[False], blocks=blocks)
    assert found.value == pytest.approx(least)
    assert found.result.bound is not None and found.result.bound <= least and found.result.status == "bounded"


def test_undivided_blocks_are_bounded():
    """Of these rules only listed values are tried, and a division may be better."""
    text = ALIKE.replace("layers.* = auto", "layers.{0..3} = auto").replace(
        "mesh", "require peak_memory <= 130GiB\nmesh"
    )
    found = solution(text)
    assert (found.joint, found.result.status) == (None, "bounded")
    assert found.value is not None and found.result.bound is not None
    assert found.result.bound < found.value
    exact = solution(text.replace("auto", "auto in [none, full]"))
    assert (exact.result.status, exact.gap) == ("optimal", 0.0)


def test_best_estimated_of_many_mixtures_are_tried(monkeypatch: pytest.MonkeyPatch):
    linted = lint(f"{ALIKE}require peak_memory <= 91GiB\n", "test.plan", directory=Path())
    plan, formula = OpenPlan(linted, directory=Path()), Formula()
    joint, state = JointMemory(plan), SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf()))
    for value in joint.holes.listed(0):
        candidate = plan.candidate((value,))
        assert candidate.analysis is not None
        state.found.evaluated.append(evaluated((value,), candidate, formula.figures(candidate.analysis)))
    state.found.best = min((one for one in state.found.evaluated if one.feasible), key=state.costs.order)
    monkeypatch.setattr(mixtures, "MOST", 5)
    tried, asked = mixtures.Mixtures(state, joint), list[Choices]()
    while wanted := tried.beside_best():
        asked += wanted
    assert len(set(asked)) == len(asked) == 5
    analyses = [plan.candidate(choices).analysis for choices in asked]
    figures = [formula.figures(analysis) for analysis in analyses if analysis is not None]
    seconds = [one.step_time for one in figures]
    assert seconds == sorted(seconds)
    least = brute_force(91 * GIB, units=["after_forward"], optimizer=[False])
    assert min(one.step_time for one in figures if one.active <= 91 * GIB) == pytest.approx(least)


@NEEDS_SOLVER
def test_conflicts_are_those_of_what_was_tried():
    lines = "require step_time <= 2000s\nrequire peak_memory <= 91GiB\nrequire recompute <= 2.5%\n"
    found = recomputing(lines)
    assert found.result.untried
    [item] = found.diagnostics
    assert item.message.startswith(
        "no values of the holes that were tried meet `peak_memory <= 91GiB` and `recompute <= 2.5%`"
    )
    assert any("`first(n, …)`" in line for line in item.help)


@NEEDS_SOLVER
@pytest.mark.parametrize("activations", ["all", pytest.param("auto in [none, all]", marks=pytest.mark.slow)])
def test_no_bound_is_the_step_that_recomputes_nothing_where_its_activations_are_copied(activations: str):
    text = TEXT.replace("(optimizer = auto)", f"(activations = {activations})").replace(
        "fsdp on dp_shard { layers.* = auto }", "fsdp blocks on dp_shard"
    )
    found = solution(f"{text}require peak_memory <= 44GiB\n")
    least = brute_force(44 * GIB, (True,), ["after_forward"], [False])
    assert found.value is not None and found.result.bound is not None
    assert found.value == pytest.approx(least)
    assert found.result.bound <= least


@NEEDS_SOLVER
@pytest.mark.parametrize(
    ("metric", "value"), [("mfu", 100.0), pytest.param("tokens_per_s", 5000.0, marks=pytest.mark.slow)]
)
def test_throughput_objectives_are_decided_jointly(metric: str, value: float):
    found = solution(f"{TEXT}require peak_memory <= 90GiB\nmaximize {metric}\n")
    assert found.value == pytest.approx(value / brute_force(90 * GIB))
    assert found.joint is not None


@NEEDS_SOLVER
def test_reserved_memory_limit_is_respected():
    [active, reserved] = [
        solution(f"{TEXT}require {metric} <= {room}GiB\n".replace("offload (optimizer = auto)\n", "")).value
        for metric, room in (("peak_memory", 90), ("reserved_memory", 91))
    ]
    assert active == pytest.approx(reserved)


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("layers.* = auto", "layers.{0..3} = auto"),
        TEXT.replace("fsdp on dp_shard { layers.* = auto }", "fsdp blocks on dp_shard").replace(
            "checkpoint { layers.* = auto }", "checkpoint { layers.* = auto in [none, full] }"
        ),
        f"{TEXT}minimize peak_memory\n",
        TEXT.replace(f"n_layers = {BLOCKS}", "n_layers = 1"),
    ],
)  # fmt: skip
def test_other_holes_search_only_listed_values(text: str):
    plan = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path())
    search = tree.Search(
        plan, bounds=tree.BoundsOf(), evaluator=Formula(), objective=objective_of(plan.analysis.plan.objective)
    )
    assert search._treatments is None


@NEEDS_SOLVER
def test_joint_answer_over_the_limit_is_corrected(monkeypatch: pytest.MonkeyPatch):
    """Blocks of two treatments fragment memory by 3 GiB, which no listed value shows."""

    class Fragmented(Formula):
        def figures(self, analysis: Analysis) -> Figures:
            figures = super().figures(analysis)
            more = 3 * GIB * (figures.points.blocks == 0)
            key = "reserved_memory bytes"
            return replace(figures, metrics={**figures.metrics, key: figures.metrics[key] + more})

    linted = lint(f"{TEXT}require reserved_memory <= 118GiB\n", "test.plan", directory=Path())
    found = solve(OpenPlan(linted, directory=Path()), Fragmented())
    assert found.best is not None
    assert found.value == pytest.approx(brute_force(114 * GIB))


@NEEDS_SOLVER
def test_mixtures_that_the_program_takes_for_too_large_are_tried(monkeypatch: pytest.MonkeyPatch):
    """One treatment fragments memory by 20 GiB if all blocks have it, and not if some do."""

    class Fragmented(Formula):
        def figures(self, analysis: Analysis) -> Figures:
            figures = super().figures(analysis)
            kept = [getattr(rule.treatment, "keep", ()) for rule in recomputed_modules(analysis).values()]
            more = 20 * GIB * (kept == [("attention", "alternate_matmul")] * BLOCKS)
            key = "reserved_memory bytes"
            return replace(figures, metrics={**figures.metrics, key: figures.metrics[key] + more})

    text = TEXT.replace("fsdp on dp_shard { layers.* = auto }", "fsdp blocks on dp_shard").replace(
        "offload (optimizer = auto)\n", ""
    )
    found = []
    for most in (0, 48):  # costs by a formula are far above all bounds, so that more than 48 may be better
        monkeypatch.setattr(mixtures, "MOST", most)
        linted = lint(f"{text}require reserved_memory <= 101GiB\n", "test.plan", directory=Path())
        found.append(solve(OpenPlan(linted, directory=Path()), Fragmented()))
    without, best = found
    assert best.value == pytest.approx(brute_force(100 * GIB, units=["after_forward"], optimizer=[False]))
    assert without.value is not None and best.value is not None
    assert without.value > best.value
    counted = sum(best.result.refused.values()) + best.result.bounded
    assert best.result.total == counted + len(best.result.evaluated) + len(best.result.failed)
