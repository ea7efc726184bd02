"""Joint answers under a pipeline, against brute force over all divisions of each stage's blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from legoai.cost.search.evaluation.evaluator import Figures, Outcome
from legoai.cost.search.memory.stage_points import RankPoints, StagePoints
from legoai.cost.search.solve import Solution, solve
from legoai.cost.search.stages.action_graph import ActionGraph, graph_of
from legoai.cost.search.stages.costs import StageWork, blocks_of_stages
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.reporting.reference import value_text
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.require import METRICS
from support.marks import NEEDS_SOLVER
from support.simulation.drawn_figures import KEPT

STAGES, BLOCKS = 2, 4
GIB = 2**30
TEXT = f"""\
plan test
model    llama3("tiny", n_layers = {STAGES * BLOCKS})
cluster  cpu(devices = 4)
batch    (global = 32, micro = 2, seq_len = 128)
mesh     (pp = 2, dp_shard = 2)
pipeline on pp (schedule = 1F1B)
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}
checkpoint {{ layers.* = auto }}
precision (param = fp32, reduce = fp32)
"""
ELSEWHERE, BESIDES, UNUSED = 12 * GIB, 40.0, GIB


def step(graph: ActionGraph, stages: Sequence[Sequence[str]]) -> tuple[float, list[float], StageWork, list[RankPoints]]:
    """Seconds, peak bytes of each rank, and the work of its stage, block by block."""
    seconds, peaks, ranks = [], [], []
    for stage, blocks in enumerate(stages):
        under_way = STAGES - stage
        kept = [KEPT[one][0] for one in blocks]
        turn = 20 + under_way * sum(kept)
        inside = [
            15 + under_way * sum(kept[: place + 1]) + (under_way - 1) * sum(kept[place + 1 :]) + 9 * (one == "full")
            for place, one in enumerate(blocks)
        ]
        seconds.append({"F": 5.0 * len(blocks), "B": sum(10.0 + KEPT[one][1] for one in blocks)})
        peaks.append(GIB * max(turn, *inside))
        points = StagePoints(
            stage=stage,
            before=GIB * turn,
            peak=GIB * max(turn, inside[-1]),
            released=GIB * kept[-1],
            inside=GIB * (inside[-2] + kept[-1]),
            under_way=[(stage, under_way)],
        )
        ranks.append(RankPoints(stages=[points], optimizer=ELSEWHERE))
    work = StageWork(
        actions={f"{stage}{kind}": took for stage, found in enumerate(seconds) for kind, took in found.items()},
        active=[round(peak) for peak in peaks],
        beyond=[2 * UNUSED] * STAGES,
        unused=[UNUSED] * STAGES,
    )
    return graph.longest(seconds)[0] + BESIDES, peaks, work, ranks


class Formula:
    """An evaluator whose figures follow from the treatment of each block."""

    simulated = 0
    graph: ActionGraph | None = None

    def begin_likely(self, candidates: Sequence[Analysis]) -> None:
        """Formulas take no time."""

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        for analysis in candidates:
            yield self.figures(analysis)

    def figures(self, analysis: Analysis) -> Figures:
        rules = recomputed_modules(analysis)
        every = [rules.get(f"layers.{place}") for place in range(STAGES * BLOCKS)]
        texts = ["none" if rule is None else value_text(rule.treatment, Checkpoint.treatments) for rule in every]
        ends = list(itertools.accumulate(blocks_of_stages(analysis), initial=0))
        stages = [texts[start:end] for start, end in itertools.pairwise(ends)]
        self.graph = graph_of(analysis)
        assert self.graph is not None
        seconds, peaks, work, ranks = step(self.graph, stages)
        metrics = {f"{name} {dimension}": 0.0 for name, metric in METRICS.items() for dimension in metric.dimensions}
        metrics |= {"step_time seconds": seconds, "peak_memory bytes": max(peaks)}
        metrics |= {"reserved_memory bytes": max(peaks) + UNUSED}
        return Figures(
            metrics=metrics, fits=True, compute=seconds, recompute=0.0, exposed={}, waiting=0.0, bubble=0.0,
            profile="cpu@0123456789ab", stages=work, ranks=ranks if len(set(texts)) == 1 else [],
        )  # fmt: skip


def solution(text: str) -> tuple[Solution, Formula]:
    linted = lint(text, "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    formula = Formula()
    return solve(OpenPlan(linted, directory=Path()), formula), formula


def brute_force(graph: ActionGraph, room: float, counts: Sequence[int] = (BLOCKS,) * STAGES) -> float:
    """Least seconds of all that a plan can write for each stage."""
    treatments = [one for one in KEPT if not one.startswith("every")]
    whole = [["full"] * count for count in counts]
    each = []
    for stage, count in enumerate(counts):
        rules = [[one] * count for one in treatments]
        for first, others in itertools.permutations(treatments, 2):
            rules += [[first] * some + [others] * (count - some) for some in range(1, count)]
        fastest: dict[float, list[str]] = {}
        for one in rules:
            if step(graph, [*whole[:stage], one, *whole[stage + 1 :]])[1][stage] <= room:
                fastest.setdefault(sum(KEPT[treatment][1] for treatment in one), one)
        each.append(list(fastest.values()))
    return min((step(graph, stages)[0] for stages in itertools.product(*each)), default=math.inf)


@NEEDS_SOLVER
@pytest.mark.parametrize("room", [55, 90, 150])
def test_joint_stage_search_equals_brute_force(room: int):
    found, formula = solution(f"{TEXT}require peak_memory <= {room}GiB\n")
    assert found.best is not None and formula.graph is not None
    assert found.value == pytest.approx(brute_force(formula.graph, room * GIB))
    assert found.value < min(
        one.figures.step_time for one in found.result.evaluated if one.feasible and one.figures.ranks
    )
    answers = found.joint
    assert answers is not None and answers.program is not None and answers.program.found is not None
    assert answers.program.predicted == pytest.approx(answers.program.found.figures.step_time)
    assert found.result.bound is not None and found.result.bound <= found.value
    written = found.text(found.best.choices, pinned=True)
    assert "stages([" in written
    assert not lint(written, "test.plan", directory=Path()).has_errors


@NEEDS_SOLVER
def test_early_stages_recompute_more_than_late_ones():
    found, _ = solution(f"{TEXT}require peak_memory <= 105GiB\n")
    assert found.best is not None
    [choice] = found.best.choices
    assert choice is not None
    text = found.plan.holes[0].choices[choice]
    assert text == "stages([first(1, budget(0.5), others = selective([attention, alternate_matmul])), none])"


@pytest.mark.slow
@NEEDS_SOLVER
def test_each_split_has_its_own_answers():
    splits = [(4, 4), (3, 5)]
    text = TEXT.replace("schedule = 1F1B", "schedule = 1F1B, split = auto in [[4, 4], [3, 5]]")
    found, formula = solution(f"{text}require peak_memory <= 105GiB\n")
    assert found.best is not None and formula.graph is not None
    assert found.value == pytest.approx(min(brute_force(formula.graph, 105 * GIB, counts) for counts in splits))
    assert found.result.bound is not None and found.result.bound <= found.value


@NEEDS_SOLVER
def test_a_solved_plan_is_compared_with_its_own_answer():
    text = f"{TEXT}require peak_memory <= 105GiB\n"
    found, _ = solution(text)
    assert found.best is not None
    again, _ = solution(found.text(found.best.choices, record=False))
    [present] = [one for one in again.baselines if one.name == "present values"]
    assert present.found is not None, present.note
    assert present.found.figures.step_time == again.value == found.value
