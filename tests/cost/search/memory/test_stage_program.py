"""Integer program of a pipeline's stages against brute force and the greedy choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from legoai.cost.search.memory.program import Offloading, Pair
from legoai.cost.search.memory.stage_blocks import RankMemory, StageBlocks, StagePair, StageRules
from legoai.cost.search.memory.stage_program import StagedDivision, StagedMemoryProblem
from legoai.cost.search.stages.action_graph import ActionGraph
from legoai.cost.search.stages.order_cache import Action
from support.marks import NEEDS_SOLVER


def graph_of(ranks: int, rounds: int, micro_batches: int, draw: random.Random) -> ActionGraph:
    """1F1B of one stage on each rank, or all forwards before all backwards, of one or two."""
    stages = ranks * rounds
    alternating = rounds == 1 and draw.random() < 0.7
    listed = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        forward = [Action(stage, "F", index) for stage in own for index in range(micro_batches)]
        backward = [Action(stage, "B", index) for stage in reversed(own) for index in range(micro_batches)]
        if alternating:
            ahead = min(micro_batches, ranks - rank)
            found = forward[:ahead]
            for index, one in enumerate(backward):
                found += [one, *forward[ahead + index : ahead + index + 1]]
            listed.append(found)
        else:
            listed.append(forward + backward)
    return ActionGraph(listed, micro_batches)


def drawn(seed: int) -> StagedMemoryProblem:
    """Treatments that hold more and take less time, or not, with rooms between the least and the most."""
    draw = random.Random(seed)
    rounds = draw.choice([1, 1, 2])
    ranks = draw.randint(1, 3 if rounds == 1 else 2)
    micro_batches = draw.randint(1, 4)
    treatments, units = draw.randint(1, 3), draw.randint(1, 2)
    kinds = [
        pair for pair in itertools.product(range(treatments), range(units)) if pair == (0, 0) or draw.random() > 0.1
    ]
    ways = draw.choice([1, 2])
    found = []
    for rank in range(ranks):
        own = list(range(rank, ranks * rounds, ranks))
        stages = [stage_of(stage, own, kinds, draw, most=2 if rounds > 1 or ranks > 2 else 4) for stage in own]
        least, most = 60, 60 + 60 * sum(stage.blocks for stage in stages)
        offloadings = [Offloading(0.0, 0.0, 0.0)]
        offloadings += [Offloading(0.0, -draw.randint(0, 40), draw.randint(-40, 20), 15.0) for _ in range(ways - 1)]
        found.append(
            RankMemory(
                stages=stages,
                elsewhere=draw.choice([0.0, draw.uniform(20, 90)]),
                optimizer=draw.randint(0, 90),
                offloadings=offloadings,
                active=draw.choice([math.inf, draw.uniform(least, most)]),
                reserved=draw.uniform(least, most),
            )
        )
    return StagedMemoryProblem(
        ranks=found,
        graph=graph_of(ranks, rounds, micro_batches, draw),
        actions=[{"F": draw.uniform(10, 20), "B": draw.uniform(20, 40)} for _ in range(ranks * rounds)],
        besides=draw.uniform(-5, 20),
        offloadings=[0.0, *(draw.uniform(0, 30) for _ in range(ways - 1))],
        micro_batches=micro_batches,
    )


def stage_of(stage: int, own: Sequence[int], kinds: Sequence[Pair], draw: random.Random, most: int) -> StageBlocks:
    blocks, base = draw.randint(1, most), draw.randint(10, 80)
    pairs = {}
    for pair in kinds:
        held = 12 * pair[0] + 7 * pair[1] + draw.randint(0, 4)
        inside = base + blocks * held + draw.randint(0, 60 if pair[0] == 0 else 20)
        pairs[pair] = StagePair(
            seconds={"F": draw.uniform(-1, 1), "B": draw.uniform(0, 3) - pair[0]},
            besides=draw.choice([0.0, draw.uniform(-1, 1)]),
            held=held,
            stays=draw.choice([0, held + draw.randint(0, 9), held // 2]),
            peak=max(inside, base + blocks * held + draw.randint(0, 60)),
            inside=inside,
            beside={other: draw.randint(0, 10) * pair[0] for other in own if other != stage},
            elsewhere=draw.randint(0, 9),
            optimizer=draw.randint(0, 9) * pair[1],
            unused=draw.choice([0, draw.randint(0, 30)]),
        )
    return StageBlocks(stage=stage, blocks=blocks, pairs=pairs)


def of_blocks(rules: StageRules, blocks: int) -> list[Pair]:
    """The pair of each block."""
    (low, high, some), (less, more, units) = rules
    return [(low if place < some else high, less if place < units else more) for place in range(blocks)]


def divisions(problem: StagedMemoryProblem) -> Iterator[StagedDivision]:
    """Every choice that a plan can write."""
    each = []
    for _, stage in sorted(problem.stages.items()):
        kinds = [sorted({pair[place] for pair in stage.pairs}) for place in (0, 1)]
        rules = [
            [(one, one, 0) for one in known]
            + [(low, high, some) for low, high in itertools.combinations(known, 2) for some in range(1, stage.blocks)]
            for known in kinds
        ]
        both = (StageRules(*two) for two in itertools.product(*rules))
        each.append([one for one in both if all(pair in stage.pairs for pair in of_blocks(one, stage.blocks))])
    for way in range(len(problem.offloadings)):
        for stages in itertools.product(*each):
            yield StagedDivision(stages, way)


def followed(problem: StagedMemoryProblem, division: StagedDivision) -> tuple[float, float]:
    """Seconds, and bytes beyond the room of the fullest rank, action by action and block by block."""
    seconds = [dict(one) for one in problem.actions]
    besides = problem.besides + problem.offloadings[division.offloading]
    excess = -math.inf
    for rank in problem.ranks:
        way = rank.offloadings[division.offloading]
        costs = {
            stage.stage: [stage.pairs[pair] for pair in of_blocks(division.stages[stage.stage], stage.blocks)]
            for stage in rank.stages
        }
        every = [one for found in costs.values() for one in found]
        points = [rank.optimizer + sum(one.optimizer for one in every) + way.optimizer]
        if rank.elsewhere:
            points.append(rank.elsewhere + sum(one.elsewhere for one in every) + way.bytes)
        for stage, found in costs.items():
            besides += sum(one.besides for one in found)
            for kind in ("F", "B"):
                seconds[stage][kind] += sum(one.seconds[kind] for one in found)
            beside = way.bytes + sum(
                one.beside[stage] for other, blocks in costs.items() if other != stage for one in blocks
            )
            points.append(found[-1].peak + sum(one.held - found[-1].held for one in found) + beside)
            for place, own in enumerate(found[:-1]):
                before = sum(one.held - own.held for one in found[:place])
                behind = sum(one.stays - own.held for one in found[place + 1 :])
                points.append(own.inside + before + behind + beside)
        unused = max(way.unused, *(one.unused for one in every))
        excess = max(excess, max(points) - rank.active, max(points) + unused - rank.reserved)
    ends: dict[tuple[int, str, int], float] = {}
    clock: dict[int, float] = {}
    rank_of = {stage.stage: number for number, rank in enumerate(problem.ranks) for stage in rank.stages}
    last = len(seconds) - 1
    for action in problem.graph.actions:
        stage, kind, index = action
        waits = 0.0
        if kind == "F" and stage:
            waits = ends[stage - 1, "F", index]
        elif kind == "B":
            waits = ends[stage, "F", index] if stage == last else ends[stage + 1, "B", index]
        rank_ = rank_of[stage]
        clock[rank_] = max(clock.get(rank_, 0.0), waits) + seconds[stage][kind]
        ends[stage, kind, index] = clock[rank_]
    return max(clock.values()) + besides, excess


MANY = (3, 4, 8, 10, 12, 13, 15, 19, 23, 24)
"""Tens of problems with many divisions, which take most of the time of all."""


@NEEDS_SOLVER
@pytest.mark.parametrize(
    "tens", [pytest.param(tens, marks=pytest.mark.slow) if tens in MANY else tens for tens in range(25)]
)
def test_stage_program_equals_brute_force(tens: int):
    for seed in range(10 * tens, 10 * tens + 10):
        problem = drawn(seed)
        best, choice = math.inf, problem.solve()
        every = list(divisions(problem))
        chosen = random.Random(seed).sample(every, min(40, len(every)))
        for division in every:
            seconds, excess = followed(problem, division)
            if division in chosen:
                assert problem.time(division) == pytest.approx(seconds)
                assert problem.excess(division) == pytest.approx(excess)
            if excess <= 0.0:
                best = min(best, seconds)
        assert (choice.division is None) == math.isinf(best), seed
        assert choice.seconds == pytest.approx(best, rel=1e-5), seed
        assert choice.status == ("infeasible" if math.isinf(best) else "optimal")
        assert choice.bound <= best * (1 + 1e-9)
        greedy = problem.greedy()
        if greedy is not None:
            assert problem.excess(greedy) <= 0.0
            assert problem.time(greedy) >= best - 1e-6


@pytest.mark.parametrize("seed", [25, 54, 99])
def test_greedy_choice_passes_changes_that_free_nothing_by_themselves(seed: int):
    problem = drawn(seed)
    greedy = problem.greedy()
    assert greedy is not None
    assert problem.excess(greedy) <= 0.0
