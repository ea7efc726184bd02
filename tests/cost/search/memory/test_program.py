"""Integer program of memory against brute force and the greedy choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from legoai.cost.search.memory.program import Division, MemoryProblem, Offloading, Pair, PairCosts
from support.marks import NEEDS_SOLVER, some_slow


def drawn(seed: int) -> MemoryProblem:
    """Treatments that hold more and take less time, or not, with rooms between the least and the most."""
    draw = random.Random(seed)
    blocks, treatments, units = draw.randint(1, 7), draw.randint(1, 4), draw.randint(1, 3)
    kept = sorted(draw.randint(0, 60) for _ in range(treatments))
    whole = sorted(draw.randint(0, 30) for _ in range(units))
    stays = [draw.choice([0, one]) for one in whole]
    base, optimizer = draw.randint(20, 200), draw.randint(0, 100)
    pairs = {}
    for pair in itertools.product(range(treatments), range(units)):
        if pairs and draw.random() < 0.1:
            continue
        held = kept[pair[0]] + whole[pair[1]]
        inside = base + blocks * held + draw.randint(0, 80 if pair[0] == 0 else 20)
        pairs[pair] = PairCosts(
            seconds=draw.uniform(-4, 8) - kept[pair[0]] / 10 - whole[pair[1]] / 10,
            held=held,
            stays=stays[pair[1]],
            peak=max(inside, base + blocks * held + draw.randint(0, 60)),
            inside=inside,
            optimizer=optimizer + blocks * stays[pair[1]],
            unused=draw.choice([0, draw.randint(0, 40)]),
        )
    offloadings = [Offloading(0.0, 0.0, 0.0)]
    if draw.random() < 0.5:
        offloadings.append(
            Offloading(draw.uniform(0, 12), -draw.randint(0, 80), draw.randint(-40, 20), draw.choice([0, 25]))
        )
    least, most = base, base + blocks * (kept[-1] + whole[-1]) + 80
    return in_units_of(
        draw.choice([1, 10**8]),
        MemoryProblem(
            blocks=blocks,
            pairs=pairs,
            offloadings=offloadings,
            active=draw.choice([math.inf, draw.uniform(least, most)]),
            reserved=draw.uniform(least, most),
        ),
    )


def in_units_of(size: int, problem: MemoryProblem) -> MemoryProblem:
    """The problem with other units of its bytes: solvers take small coefficients for zeros."""
    sizes = ("held", "stays", "peak", "inside", "optimizer", "unused")
    return replace(
        problem,
        pairs={
            pair: replace(one, **{name: size * getattr(one, name) for name in sizes})
            for pair, one in problem.pairs.items()
        },
        offloadings=[Offloading(one.seconds, *(size * value for value in one[1:])) for one in problem.offloadings],
        active=size * problem.active,
        reserved=size * problem.reserved,
    )


def divisions(problem: MemoryProblem) -> Iterator[tuple[Division, list[Pair]]]:
    """Every choice that a plan can write, with the pair of each block."""
    blocks = problem.blocks
    kinds = [sorted({pair[place] for pair in problem.pairs}) for place in (0, 1)]
    rules = [
        [(one, one, 0) for one in known]
        + [(low, high, some) for low, high in itertools.combinations(known, 2) for some in range(1, blocks)]
        for known in kinds
    ]
    for first, second in itertools.product(*rules):
        of_block = [
            (first[0] if place < first[2] else first[1], second[0] if place < second[2] else second[1])
            for place in range(blocks)
        ]
        if all(pair in problem.pairs for pair in of_block):
            for way in range(len(problem.offloadings)):
                yield Division(first, second, way), of_block


def followed(problem: MemoryProblem, of_block: list[Pair], way: int) -> tuple[float, float]:
    """Seconds, and bytes beyond the room at the worst point, block by block."""
    costs = [problem.pairs[pair] for pair in of_block]
    offloaded = problem.offloadings[way]
    points = [costs[-1].peak + sum(one.held - costs[-1].held for one in costs) + offloaded.bytes]
    for place, own in enumerate(costs):
        before = sum(one.held - own.held for one in costs[:place])
        behind = sum(one.stays - own.held for one in costs[place + 1 :])
        points.append(own.inside + before + behind + offloaded.bytes)
    points.append(sum(one.optimizer for one in costs) / len(costs) + offloaded.optimizer)
    unused = max(offloaded.unused, *(one.unused for one in costs))
    excess = max(max(points) - problem.active, max(points) + unused - problem.reserved)
    return sum(one.seconds for one in costs) + offloaded.seconds, excess


@NEEDS_SOLVER
@pytest.mark.parametrize("tens", some_slow(range(25), *range(8, 25)))
def test_memory_program_equals_brute_force(tens: int):
    for seed in range(10 * tens, 10 * tens + 10):
        problem = drawn(seed)
        best, choice = math.inf, problem.solve()
        for division, of_block in divisions(problem):
            seconds, excess = followed(problem, of_block, division.offloading)
            assert problem.time(division) == pytest.approx(seconds)
            assert problem.excess(division) == pytest.approx(excess)
            if excess <= 0.0:
                best = min(best, seconds)
        assert (choice.division is None) == math.isinf(best), seed
        assert choice.seconds == pytest.approx(best, abs=1e-6), seed
        assert choice.status == ("infeasible" if math.isinf(best) else "optimal")
        greedy = problem.greedy()
        if greedy is not None:
            assert problem.excess(greedy) <= 0.0
            assert problem.time(greedy) >= best - 1e-6


def test_greedy_choice_recovers_from_a_bad_first_step():
    """It takes the cheaper of two treatments first, and can then not free enough."""
    fast = PairCosts(0.0, 10.0, 0.0, 100.0, 100.0, 0.0)
    some = PairCosts(1.0, 6.0, 0.0, 60.0, 60.0, 0.0)
    most = PairCosts(5.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    problem = MemoryProblem(
        blocks=10, pairs={(0, 0): most, (1, 0): some, (2, 0): fast}, offloadings=[Offloading(0.0, 0.0, 0.0)],
        active=30.0, reserved=math.inf,
    )  # fmt: skip
    greedy = problem.greedy()
    assert greedy is not None
    assert greedy.checkpoint == (0, 1, 5)


def test_greedy_choice_passes_treatments_whose_first_block_frees_less_than_it_leaves_unused():
    """One block frees 4 bytes and leaves 6 unused, two free 8: only together do they free what is missing."""
    fast = PairCosts(0.0, 10.0, 0.0, 100.0, 100.0, 0.0)
    some = PairCosts(1.0, 6.0, 0.0, 60.0, 60.0, 0.0, unused=6.0)
    problem = MemoryProblem(
        blocks=10, pairs={(0, 0): some, (1, 0): fast}, offloadings=[Offloading(0.0, 0.0, 0.0)], active=math.inf,
        reserved=79.0,
    )  # fmt: skip
    greedy = problem.greedy()
    assert greedy is not None
    assert greedy.checkpoint == (0, 1, 7)
    assert replace(problem, reserved=65.0).greedy() is None


@NEEDS_SOLVER
def test_program_that_presolve_does_not_end_on_is_solved():
    """The presolve of HiGHS 1.16 goes on for ever, whatever its limit of time is."""
    costs = (
        (0.0, 0.0, 48501732352, 45788231680.0, 24407854080.0),
        (-0.006902412967166471, 272630784.0, 70312195072, 67326063616.0, 13803572736.0),
        (-0.017762334047274786, 1279263744.0, 150842831872, 146850067456.0, 15112195584.0),
        (-0.020720041228179876, 1782580224.0, 191108150272, 186880504832.0, 25782504960.0),
        (-0.03137581157330018, 2554332160.0, 252848305152, 247580472320.0, 16185937408.0),
        (-0.034431111594886765, 3024094208.0, 290429268992, 284960109568.0, 20615122432.0),
        (-0.03526338500422495, 3862955008.0, 357538132992, 350961677312.0, 30455811072.0),
        (-0.03778450891520686, 5171708928.0, 462238446592, 454353236992.0, 15796733952.0),
    )
    pairs = {
        (place, 0): PairCosts(seconds, held, -255065600.0, peak, inside, 4477665792, unused)
        for place, (seconds, held, peak, inside, unused) in enumerate(costs)
    }
    offloadings = [Offloading(0.0, 0.0, 0.0)]
    found = MemoryProblem(
        blocks=80, pairs=pairs, offloadings=offloadings, active=77309411328, reserved=83336214610
    ).solve()
    assert found.status == "optimal" and found.division is not None
    assert found.seconds == pytest.approx(-0.262291692752326)
