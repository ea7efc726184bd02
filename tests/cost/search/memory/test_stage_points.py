"""Memory of separately treated pipeline stages, predicted from observed plans that treat all stages equally."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.holes import MemoryHoles, Values
from legoai.cost.search.joint.stages import ObservedStageMemory
from legoai.cost.search.memory.stage_blocks import StageRules
from legoai.cost.search.memory.stage_program import StagedDivision
from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.costs import Room, blocks_of_stages
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

# Its kernels take longer than the host needs to issue them. Where the host is late, an action's time depends on how
# long its rank waited before.
TEXT = """\
plan test
model   llama3("tiny", n_layers = 12, dim = 1024, n_heads = 16, n_kv_heads = 8)
cluster h100_sxm(devices = 4)
batch   (global = 1024, micro = 64, seq_len = 1024)
mesh    (pp = 2, dp_shard = 2)
pipeline on pp (schedule = {schedule})
fsdp on dp_shard {{ layers.* = auto }}
checkpoint {{ layers.* = auto }}
"""
ROOM = Room(float("inf"), float("inf"), float("inf"))


def figures(text: str) -> Figures:
    analysis = lint(text, "test.plan", directory=Path()).analysis
    assert analysis is not None and analysis.manifest is not None
    return Figures.of(estimate(lower(analysis), analysis.plan, analysis.manifest, directory=Path()), analysis)


def seen(holes: MemoryHoles, values: Values) -> Figures:
    text = holes.plan.resolution.file.text
    for hole, value in ((holes.holes.fsdp, values.fsdp), (holes.holes.checkpoint, values.checkpoint)):
        assert hole is not None and value is not None
        text = text.replace("auto", holes.plan.holes[hole].choices[value], 1)
    return in_the_simulator(figures, text)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("Interleaved1F1B", 4)])
def test_stage_memory_and_time_follow_from_uniform_treatments(schedule: str, stages: int):
    plan = OpenPlan(lint(TEXT.format(schedule=schedule), "test.plan", directory=Path()), directory=Path())
    holes = MemoryHoles(plan)
    analysis = plan.candidate((0, 0)).analysis
    assert analysis is not None
    graph = graph_of(analysis)
    assert graph is not None and holes.holes.checkpoint is not None and holes.holes.fsdp is not None
    none, full = (plan.holes[holes.holes.checkpoint].choices.index(word) for word in ("none", "full"))
    unit, kept = (
        plan.holes[holes.holes.fsdp].choices.index(f"unit{word}") for word in ("", "(reshard = after_backward)")
    )
    every = [Values(one, other, None) for one in (none, full) for other in (unit, kept)]
    known = {values: seen(holes, values) for values in every}
    learnt = ObservedStageMemory(holes, every[0], known, graph, blocks_of_stages(analysis))
    problem = learnt.problem(ROOM)

    def check(division: StagedDivision, found: Figures) -> None:
        assert problem.time(division) == pytest.approx(found.step_time, rel=0.01)
        for rank, options, active in zip(problem.ranks, problem.options(division), found.stages.active, strict=True):
            assert rank.taken(options, 0)[0] == pytest.approx(active, rel=0.01)

    for pair, [one] in learnt.pairs():
        rules = StageRules((pair[0], pair[0], 0), (pair[1], pair[1], 0))
        check(StagedDivision((rules,) * stages, 0), one)
    blocks = 12 // stages
    apart = [StageRules((0, 1, 1 + stage % 2), (0, 1, blocks - 1 - stage % 2)) for stage in range(stages - 1)]
    division = StagedDivision((*apart, StageRules((1, 1, 0), (1, 1, 0))), 0)
    written = learnt.written(division)
    assert learnt.division(written) == division
    check(division, seen(holes, learnt.values(written)))
