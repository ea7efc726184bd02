"""Bucketings: the dynamic programme agrees with all of them, and Algorithm 1 is never better."""

from __future__ import annotations

import math
import random

import pytest

from legoai.cost.search.buckets.algorithm_1 import algorithm_1, of_backward, of_forward
from legoai.cost.search.buckets.exact import least_added
from legoai.cost.search.buckets.problem import BucketProblem, Neighbour, Unit, Work
from support.simulation.stage_splits import splits


def drawn(seed: int) -> BucketProblem:
    """A problem of a few unlike units, whose collectives take a latency and their bytes; some with little room."""
    draw = random.Random(seed)
    tight = seed % 3 == 0
    slowdowns = draw.choice([[1.0], [1.0, 1.3, 1.7]])
    sizes = draw.choice([[1] * 8, list(range(1, 9)), [1, 1, 4, 9]])

    def room() -> float:
        return draw.uniform(20, 80) if tight else math.inf

    def work(most: float) -> Work:
        pieces = [draw.uniform(0, most / 3) for _ in range(3)]
        copies, *kernels = [(piece, piece * draw.choice(slowdowns)) for piece in pieces]
        return Work(copies, tuple(kernels))

    units = [Unit(work(12), work(24), draw.choice(sizes), room(), room()) for _ in range(draw.randint(1, 9))]
    latency, rate = draw.uniform(0, 6), draw.uniform(0.2, 3)
    again = draw.random() < 0.8

    def neighbour() -> Neighbour:
        values = [draw.choice([0.0, draw.uniform(0, 10)]) for _ in range(3)]
        return Neighbour(work(10), work(10), *values, room(), room())

    return BucketProblem(
        units=units,
        before=neighbour(),
        after=neighbour(),
        gather=lambda size: latency + rate * size,
        gather_again=lambda size: (latency + rate * size) if again else 0.0,
        reduce=lambda size: latency + 2 * rate * size,
        gathered_bytes=1.0,
        reduced_bytes=2.0,
        overlaps=draw.random() < 0.9,
    )


def every(problem: BucketProblem) -> list[tuple[int, ...]]:
    count = len(problem.units)
    return [counts for buckets in range(1, count + 1) for counts in splits(count, buckets) if problem.fits(counts)]


def test_dynamic_program_equals_brute_force():
    better = infeasible = 0
    for seed in range(150):
        problem = drawn(seed)
        found, fitting, greedy = least_added(problem), every(problem), algorithm_1(problem)
        if found is None:
            assert not fitting, seed
            infeasible += 1
            continue
        assert problem.fits(found), seed
        least = min(map(problem.added, fitting))
        assert problem.added(found) == pytest.approx(least, rel=1e-12), seed
        if problem.fits(greedy):
            assert problem.added(found) <= problem.added(greedy)
            better += least < 0.99 * problem.added(greedy)
    assert better > 15  # the greedy one is often worse
    assert infeasible > 3


def uniform(count: int, *, forward: float, backward: float, **changes: object) -> BucketProblem:
    given: dict = {
        "units": [Unit(Work.of(forward, 1.25), Work.of(backward, 1.25), 1)] * count,
        "gather": lambda size: 1.0 + size,
        "gather_again": lambda size: 1.0 + size,
        "reduce": lambda size: 1.0 + 2 * size,
    }
    return BucketProblem(**(given | changes))


def test_communication_slows_the_next_computation():
    works = Work((1.0, 1.5), ((2.0, 4.0), (3.0, 3.0)))
    problem = BucketProblem(
        units=[Unit(works, Work(), 1)] * 2, gather=float, gather_again=float, reduce=float
    )  # fmt: skip
    one, both = problem.span(0, 1), problem.span(0, 2)
    # 1.5 seconds beside copies, then half as fast, then as alone; what is left is exposed.
    assert [problem.window(seconds, one.forward) for seconds in (1.5, 5.5, 8.5, 10.5)] == [0.5, 2.5, 2.5, 4.5]
    # Both are copied out first; the second is slowed when the first has computed.
    assert [problem.window(seconds, both.forward) for seconds in (3.0, 7.0, 10.0, 12.0)] == [1.0, 3.0, 3.0, 4.0]


def test_algorithm_1_grows_a_bucket_while_communication_is_hidden():
    # 1 + 1 are hidden by nothing; then 1 + n by 4 seconds of each unit that computes.
    assert of_forward(uniform(14, forward=4.0, backward=0.0)) == (1, 3, 10)
    # Behind the last unit 5 seconds compute. Beside its 4 units, of which nothing is reduced yet, 1 + n take up to 24;
    # then 1 + 2 · 4 seconds of reduction are added.
    problem = uniform(14, forward=0.0, backward=6.0, after=Neighbour(backward=Work.of(5.0)))
    assert of_backward(problem) == (10, 4)
    wide = uniform(60, forward=0.0, backward=6.0, after=Neighbour(backward=Work.of(5.0)))
    assert of_backward(wide) == (33, 23, 4)


def test_algorithm_1_stops_at_the_memory_limit():
    problem = uniform(9, forward=100.0, backward=100.0, gathered_bytes=1.0)
    tight = BucketProblem(
        units=[Unit(Work.of(100.0), Work.of(100.0), 1, forward_room=4.0)] * 9,
        gather=problem.gather, gather_again=problem.gather_again, reduce=problem.reduce, gathered_bytes=1.0,
    )  # fmt: skip
    assert of_forward(problem) == (1, 8)
    assert of_forward(tight) == (1, 3, 1, 3, 1)


def test_algorithm_1_merges_nothing_without_overlap():
    problem = uniform(6, forward=9.0, backward=9.0, overlaps=False)
    assert algorithm_1(problem) == (1,) * 6
    assert least_added(problem) == (6,)  # each collective has its latency, and all of it is exposed
    assert problem.added((6,)) == pytest.approx(7 + 7 + 13)


def test_deep_model_is_solved_in_seconds():
    problem = uniform(60, forward=3.0, backward=6.0)
    found = least_added(problem)
    assert found is not None
    assert problem.added(found) <= problem.added(algorithm_1(problem))
