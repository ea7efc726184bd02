"""Search over the answers of holes, against brute force with random figures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from legoai.cost.search.branch_and_bound import probe_simulation, tree
from legoai.cost.search.branch_and_bound.neighbours import Neighbours
from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds import bounds
from legoai.cost.search.candidate_bounds.bounds import Bounds, BoundsOf
from legoai.cost.search.candidates import order_of
from legoai.cost.search.evaluation.evaluator import Figures, Outcome, OutOfTimeError, Simulation
from legoai.cost.search.joint.holes import MemoryHoles
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.solve import solve
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.dsl.open_rules import with_open_rules
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.mesh import Mesh
from legoai.specs.directives.precision import Precision
from legoai.specs.directives.require import METRICS
from support.marks import NEEDS_SOLVER, slow_but, some_slow
from support.simulation.drawn_figures import Drawn
from support.simulation.searched import SCHEDULED, TEXT, bounds_of, brute_force, opened
from support.simulation.stage_splits import splits

OBJECTIVES = {
    "": ("step_time", 1),
    "minimize peak_memory\n": ("peak_memory", 1),
    "maximize tokens_per_s\n": ("tokens_per_s", -1),
}


@pytest.mark.parametrize("goal", OBJECTIVES)
@pytest.mark.parametrize("seed", some_slow(range(3), 2))
def test_search_equals_brute_force(goal: str, seed: int):
    limit = "" if seed % 2 else "require peak_memory <= 20MiB\n"
    plan, evaluator = opened(TEXT + limit + goal), Drawn(seed, failing=0.1)
    metric, sign = OBJECTIVES[goal]
    best = brute_force(plan, evaluator, metric, sign)
    solution = solve(plan, evaluator)
    assert solution.value == best
    least = min([sign * best, *bounds_of(plan, solution.result)])
    assert solution.result.bound == sign * least
    assert solution.result.status == ("optimal" if solution.result.bound == best else "bounded")
    assert (solution.gap == 0.0) == (solution.result.status == "optimal")
    counted = sum(solution.result.refused.values()) + solution.result.bounded
    assert solution.result.total == counted + len(solution.result.evaluated) + len(solution.result.failed)


@pytest.mark.parametrize("goal", slow_but(OBJECTIVES, "maximize tokens_per_s\n"))
@pytest.mark.parametrize("seed", some_slow(range(3), 1, 2))
@pytest.mark.parametrize("many", [0, 10**9])
def test_search_to_within_a_gap(goal: str, seed: int, many: int, monkeypatch: pytest.MonkeyPatch):
    """No candidate is better by more than the gap, and fewer are evaluated than by an exact search."""
    monkeypatch.setattr(tree, "_MANY", many)
    metric, sign = OBJECTIVES[goal]
    best = brute_force(opened(TEXT + goal), Drawn(seed), metric, sign)
    exact = solve(opened(TEXT + goal), Drawn(seed), gap=0.0)
    assert (exact.result.status, exact.value, exact.result.bound) == ("optimal", best, best)
    found = solve(opened(TEXT + goal), Drawn(seed), gap=0.3)
    assert best is not None and found.value is not None and found.result.bound is not None and found.gap is not None
    assert found.gap <= 0.3
    assert found.result.status == ("optimal" if found.result.bound == found.value else "bounded")
    assert sign * found.result.bound <= sign * best <= sign * found.value
    assert len(found.result.evaluated) <= len(exact.result.evaluated)
    counted = sum(found.result.refused.values()) + found.result.bounded
    assert found.result.total == counted + len(found.result.evaluated) + len(found.result.failed)


def test_wide_gap_avoids_evaluations():
    evaluated = [len(solve(opened(), Drawn(1), gap=gap).result.evaluated) for gap in (0.0, 0.9)]
    assert evaluated[1] < evaluated[0]


def test_dtypes_are_decided_first():
    text = TEXT.replace("param = fp32", "param = auto in [bf16, fp32]").replace(" (sequence = auto)", "")
    plan = opened(text)
    first = order_of(plan.holes)[0]
    assert plan.holes[first].owner is Precision
    answers = [[index if hole == first else None for hole in range(len(plan.holes))] for index in range(2)]
    bounded = [BoundsOf()(analysis).step_time for one in answers if (analysis := plan.candidate(one).analysis)]
    assert len(bounded) == 2
    assert min(bounded) > 0.0


@pytest.mark.parametrize("text", some_slow([TEXT, SCHEDULED], TEXT), ids=["unscheduled", "scheduled"])
@pytest.mark.parametrize("goal", ["maximize mfu", "maximize tokens_per_s", "minimize step_time"])
def test_objective_bound_equals_the_objective_at_its_step_time(text: str, goal: str):
    """At the time that a candidate takes, the bound of the objective is the objective."""
    plan = opened(f"{text}{goal}\n")
    candidate = plan.candidate([0] * len(plan.holes))
    assert candidate.analysis is not None
    with Simulation(directory=Path()) as evaluator:
        [found] = evaluator.evaluate([candidate.analysis], None)
    assert isinstance(found, Figures)
    objective = objective_of(plan.resolution.plan.objective)
    value = found.metric(objective.metric, METRICS[objective.metric].dimensions[0])
    costs = Costs(objective=objective, bounds=BoundsOf())
    assert costs.value(costs.least(Bounds(step_time=found.step_time), candidate)) == pytest.approx(value)


def test_reserved_memory_bound_is_the_active_bound():
    plan = opened(f"{TEXT}minimize reserved_memory\n")
    costs = Costs(objective=objective_of(plan.resolution.plan.objective), bounds=BoundsOf())
    assert costs.least(Bounds(memory=5.0), plan.candidate([0] * len(plan.holes))) == 5.0


def test_tight_bounds_avoid_evaluations():
    """Where figures equal their bounds, candidates worse than the best are never evaluated."""
    plan, evaluator = opened(), Drawn(1, tight=True)
    found = solve(plan, evaluator).result
    assert found.bounded > len(found.evaluated)


@pytest.mark.parametrize("seed", some_slow(range(3), 1, 2))
def test_depth_first_dives_find_the_same_optimum(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree, "_PATIENCE", 1)
    plan, evaluator = opened(), Drawn(seed)
    best = brute_force(plan, evaluator, "step_time", 1)
    solution = solve(plan, evaluator)
    assert (solution.result.status, solution.value, solution.result.bound) == ("optimal", best, best)


@pytest.mark.parametrize("text", [TEXT, SCHEDULED, TEXT + "require peak_memory <= 20MiB\n"])
@pytest.mark.parametrize("seed", some_slow(range(3), 1, 2))
def test_local_search_does_not_change_the_result(text: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Candidates evaluated before the tree reaches them are counted once, probes are not, and the best is the same."""
    lesson = probe_simulation.with_one_micro_batch
    lessons: list[str] = []

    def noted(analysis: Analysis) -> Analysis:
        lessons.append((short := lesson(analysis)).plan.digest)
        return short

    monkeypatch.setattr(probe_simulation, "with_one_micro_batch", noted)
    monkeypatch.setattr(tree, "_MANY", 0)
    plan, evaluator = opened(text), Drawn(seed, failing=0.1)
    evaluated: list[Any] = []
    seen = evaluator.evaluate

    def evaluate(candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        evaluated.extend(item.plan.digest for item in candidates)
        return seen(candidates, deadline)

    monkeypatch.setattr(evaluator, "evaluate", evaluate)
    found = Search(plan, bounds=BoundsOf(), evaluator=evaluator, objective=objective_of(None), gap=0.0).run()
    assert found.best is not None
    assert found.bound is not None
    assert found.status == "optimal" or (found.failed and found.bound < found.best.figures.step_time)
    if text is not SCHEDULED:  # whose candidates that mean the same are drawn apart
        best = brute_force(plan, evaluator, "step_time", 1)
        assert best == found.best.figures.step_time
        assert found.bound == (best if found.status == "optimal" else min(bounds_of(plan, found)))
    once = Counter(evaluated) - Counter(lessons)
    assert len(once) == once.total() == len(found.evaluated) + len(found.failed)
    counted = sum(found.refused.values()) + found.bounded
    assert found.total == counted + len(found.evaluated) + len(found.failed)


def test_first_candidate_is_found_before_all_shallow_nodes(monkeypatch: pytest.MonkeyPatch):
    """Where figures are far above their bounds, each node is expanded before the first candidate is."""
    linted = []
    seen = OpenPlan.candidate

    def candidate(self: OpenPlan, *args: Any, **named: Any) -> Candidate:
        linted.append(args)
        return seen(self, *args, **named)

    class First(Drawn):
        def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
            looked_at.append(len(linted))
            raise OutOfTimeError

    monkeypatch.setattr(OpenPlan, "candidate", candidate)
    monkeypatch.setattr(tree, "_MANY", 10**9)
    looked_at: list[int] = []
    text = SCHEDULED.replace("dp_shard = rest", "dp_shard = rest, tp = auto").replace("devices = 4", "devices = 16")
    text = text.replace("fsdp blocks", "shard standard on tp\nloss auto\nfsdp blocks")
    for patience in (1_000, 2):
        monkeypatch.setattr(tree, "_PATIENCE", patience)
        linted.clear()
        Search(opened(text), bounds=BoundsOf(), evaluator=First(0), objective=objective_of(None)).run()
    assert looked_at[1] < looked_at[0] / 2


def test_pipeline_options_with_one_rank_are_not_searched():
    plan = opened(SCHEDULED)
    found = Search(plan, bounds=BoundsOf(), evaluator=Drawn(0), objective=objective_of(None)).run()
    holes = [hole.what for hole in plan.holes]
    pp, schedule = holes.index("mesh pp"), next(i for i, one in enumerate(holes) if "schedule" in one)
    ranks = [(plan.holes[pp].choices[item.choices[pp]], item.choices[schedule]) for item in found.evaluated]
    assert {one for size, one in ranks if size == "1"} == {0}
    assert found.status == "optimal"
    counted = sum(found.refused.values()) + found.bounded
    assert found.total == counted + len(found.evaluated) + len(found.failed)


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_stopped_search_has_a_valid_bound(limit: int):
    """The bound of a stopped search is no better than the result of the complete search."""
    evaluator = Drawn(3)
    best = brute_force(opened(), evaluator, "step_time", 1)
    evaluator.limit = limit
    solution = solve(opened(), evaluator)
    assert solution.result.status == "time_limit"
    assert solution.result.bound <= best
    assert solution.value is None or (solution.value >= best and solution.gap >= 0.0)


@NEEDS_SOLVER
@pytest.mark.parametrize("limit", some_slow([2, 8, 20], 2, 20))
def test_candidates_without_joint_bounds_keep_their_own_bound(limit: int):
    text = TEXT.replace('llama3("tiny")', 'mixtral("tiny", n_layers = 8)').replace(
        "auto in [none, full, every(2)]", "auto"
    )
    text = text.replace("auto in [2, 8, 16]", "auto").replace("tp = auto", "ep = auto")
    text = text.replace("on tp (sequence = auto)", "on ep") + "attention auto\n"
    plan, evaluator = opened(text), Drawn(0)
    assert MemoryHoles(plan).apply
    evaluator.limit = limit
    found = solve(plan, evaluator).result
    assert found.status == "time_limit"
    assert plan.analysis is not None
    assert found.bound is not None
    assert found.bound >= BoundsOf()(plan.analysis).step_time > 0.0


def test_interrupt_returns_the_best_so_far():
    class Interrupted(Drawn):
        def evaluate(self, candidates, deadline):
            for outcome in super().evaluate(candidates, deadline):
                if self.asked > 4:
                    raise KeyboardInterrupt
                yield outcome

    solution = solve(opened(), Interrupted(5))
    assert solution.result.status == "interrupted"
    assert len(solution.result.evaluated) == 4
    assert solution.result.bound <= solution.value


@pytest.mark.parametrize(("stop", "status"), [(OutOfTimeError, "time_limit"), (KeyboardInterrupt, "interrupted")])
def test_stopped_batch_keeps_what_is_known(stop: type[BaseException], status: str):
    """The first candidate of the batch is waited for, and every second one of the others has its figures already."""

    class Stopped(Drawn):
        def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
            asked.extend(candidates)
            raise stop

        def finished(self, candidates: Sequence[Analysis]) -> list[Outcome | None]:
            return [self.figures(one) if place % 2 else None for place, one in enumerate(candidates)]

    asked: list[Analysis] = []
    evaluator, plan = Stopped(3, failing=0.2), opened()
    found = Search(plan, bounds=BoundsOf(), evaluator=evaluator, objective=objective_of(None)).run()
    known = [evaluator.figures(one) for one in asked[1::2]]
    assert len(asked) == tree.AT_ONCE
    assert [item.figures for item in found.evaluated] == [one for one in known if isinstance(one, Figures)]
    assert len(found.evaluated) + len(found.failed) == len(known)
    assert found.status == status
    assert found.best is not None
    assert found.best.figures.step_time == min(one.figures.step_time for one in found.evaluated if one.feasible)
    assert found.bound is not None
    complete = Search(opened(), bounds=BoundsOf(), evaluator=Drawn(3, failing=0.2), objective=objective_of(None)).run()
    assert complete.best is not None
    assert found.bound <= complete.best.figures.step_time


def test_equal_plans_give_equal_searches():
    first, second = (
        Search(opened(), bounds=BoundsOf(), evaluator=Drawn(4), objective=objective_of(None)).run() for _ in "ab"
    )
    assert first.evaluated == second.evaluated
    assert first.best == second.best


STAGED = """\
plan test
model   llama3("tiny", n_layers = 8)
cluster cpu(devices = 4)
batch   (global = 8, micro = auto in [1, 2], seq_len = 128)
mesh    (pp = auto in [2, 4], dp_shard = rest)
fsdp blocks on dp_shard
pipeline on pp (split = auto)
precision (param = fp32, reduce = fp32)
"""


@NEEDS_SOLVER
@pytest.mark.parametrize("tight", [False, True])
def test_solved_splits_are_added_and_bounds_cover_the_rest(tight: bool):
    plan, evaluator = opened(STAGED), Drawn(2, tight=tight)
    found = solve(plan, evaluator).result
    counted = sum(found.refused.values()) + found.bounded
    assert found.total == counted + len(found.evaluated) + len(found.failed) > 12
    [hole] = [index for index, one in enumerate(plan.holes) if one.assigns]
    added = [item for item in found.evaluated if item.choices[hole] >= plan.holes[hole].listed]
    assert added
    assert found.status in ("optimal", "bounded")
    for item in found.evaluated:
        # Every split, and not only those that were tried.
        stages = plan.candidate(item.choices).plan.mesh.pp
        for counts in splits(8, stages):
            value = plan.add(hole, f"[{', '.join(map(str, counts))}]")
            candidate = plan.candidate((*item.choices[:hole], value, *item.choices[hole + 1 :]))
            assert found.bound <= BoundsOf()(candidate.analysis).step_time * (1 + 1e-9) or found.status == "optimal"
        break
    assert (found.status == "optimal") == (found.bound == found.best.figures.step_time)


@NEEDS_SOLVER
def test_splits_that_are_all_refused_leave_no_gap():
    text = STAGED.replace("n_layers = 8", "n_layers = 8, tie_embeddings = true").replace("[2, 4]", "[1, 2]")
    found = solve(opened(text), Drawn(2)).result
    assert found.refused["LP515"] == found.total / 2
    assert found.status == "optimal" and found.bound == found.best.figures.step_time


def test_missing_solver_leaves_the_listed_splits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "installed", lambda: None)
    plan = opened(STAGED)
    found = solve(plan, Drawn(2)).result
    assert found.total == 12
    assert all(hole.listed == len(hole.choices) for hole in plan.holes)


@NEEDS_SOLVER
def test_solved_split_is_compared_with_its_present_values():
    text = STAGED.replace("auto in [1, 2]", "1").replace("auto in [2, 4]", "2").replace("auto)", "auto -> [5, 3])")
    [present] = [item for item in solve(opened(text), Drawn(4)).baselines if item.name == "present values"]
    assert present.found is not None


@pytest.mark.slow
@NEEDS_SOLVER
def test_search_tries_few_styles_beside_each_of_the_other_answers():
    text = TEXT.replace("shard standard on tp (sequence = auto)", "shard auto on tp").replace("tp = auto)", "tp = 2)")
    linted = with_open_rules(lint(text, "test.plan", directory=Path()), directory=Path())
    found = solve(OpenPlan(linted, directory=Path()), Drawn(1)).result
    assert found.status == "bounded"
    assert found.total == sum(found.refused.values()) + found.bounded + found.left_out + len(found.evaluated)
    assert 9 <= len(found.evaluated) <= 9 * (1 + 4)  # of the program, and of the forms of the standard layout
    assert found.left_out > 1e9
    assert found.best is not None
    assert found.bound < found.best.figures.step_time  # other styles were not simulated


ALL_OPEN = """\
plan test
model   llama3("1b")
cluster h100_sxm
batch   (global = 64, micro = auto, seq_len = 4096)
mesh    (dp_shard = rest)
fsdp blocks on dp_shard { layers.* = unit(reshard = auto) }
checkpoint { layers.* = auto in [none, full] }
attention auto
offload (optimizer = auto)
require peak_memory <= 40GiB
"""


def test_search_starts_at_the_fastest_and_the_smallest_bound():
    plan = opened(ALL_OPEN)
    near = Neighbours(SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf())))
    fastest, smallest = next(found for found in near.first() if len(found) == 2)
    named = [
        {hole.what: hole.choices[value] for hole, value in zip(plan.holes, choices, strict=True)}
        for choices in (fastest, smallest)
    ]
    assert [(one["checkpoint layers.*"], one["offload optimizer"]) for one in named] == [
        ("none", "none"), ("full", "all"),
    ]  # fmt: skip
    assert named[0]["batch micro"] == named[1]["batch micro"] != "1"


def test_all_legal_degrees_are_listed_in_order():
    text = ALL_OPEN.replace("(dp_shard = rest)", "(dp_shard = rest, cp = auto, tp = auto in [1, 2, 8])\ncontext on cp")
    plan = opened(text.replace("attention auto", "shard standard on tp"))
    near = Neighbours(SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf())))
    ways = list(near._degrees())
    places = [near._place(way) for way in ways]
    assert places == sorted(places)
    open_holes = [hole.owner in (Mesh, Batch) for hole in plan.holes]
    every = itertools.product(
        *(range(hole.listed) if decided else (None,) for hole, decided in zip(plan.holes, open_holes, strict=True))
    )
    assert set(ways) == {way for way in every if not plan.candidate(way).errors}
    assert len(ways) > 10


def test_block_division_is_bounded_with_each_later_answer():
    """Memory is decided before the form of the loss, so that divisions of blocks are bounded without it."""
    text = f"{ALL_OPEN}loss auto in [eager, chunked(4)]\n".replace("auto in [none, full]", "auto")
    plan, bounds = opened(text.replace("offload (optimizer = auto)\n", "")), BoundsOf()
    search = Search(plan, bounds=bounds, evaluator=Drawn(0), objective=objective_of(None))
    loss = next(index for index, hole in enumerate(plan.holes) if hole.what == "loss form")
    treatment = next(index for index, hole in enumerate(plan.holes) if hole.what == "checkpoint layers.*")
    choices = tuple(None if index in (loss, treatment) else 0 for index in range(len(plan.holes)))
    search.nodes.untried[choices] = 0.0
    least = search.nodes.least_untried(math.inf)
    decided = [(*choices[:loss], value, *choices[loss + 1 :]) for value in (0, 1)]
    each = [bounds(plan.candidate(one).analysis).step_time for one in decided]
    assert search.nodes.untried == dict(zip(decided, each, strict=True))
    assert least == min(each) > 0.0


def test_open_nodes_are_bounded_again_after_new_observations(monkeypatch: pytest.MonkeyPatch):
    plan = opened()
    search = Search(plan, bounds=BoundsOf(), evaluator=Drawn(0), objective=objective_of(None))
    nodes, chosen = search.nodes, (0,) * len(plan.holes)
    nodes.push(chosen, search.state.candidate(chosen), 1.0)
    nodes.bound_untried(chosen, 1.0)
    nodes.raise_least(math.inf)
    assert nodes.heap[0][0] == nodes.untried[chosen] == 1.0

    search.state.bounds.layers.own = object()
    monkeypatch.setattr(BoundsOf, "__call__", lambda *_: Bounds(step_time=5.0))
    nodes.raise_least(math.inf)
    assert [bound for bound, *_ in nodes.heap] == [5.0]
    assert nodes._left_anew(chosen)
    assert nodes.untried[chosen] == 5.0
    assert not nodes._left_anew(chosen)

    search.state.bounds.layers.own = object()
    monkeypatch.setattr(Costs, "bounded", lambda *_: None)
    nodes.raise_least(math.inf)
    assert not nodes.heap
    assert nodes._left_anew(chosen)
    assert not nodes.untried
