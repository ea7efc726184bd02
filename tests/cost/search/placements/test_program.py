"""Integer program of placements against brute force on random graphs, and its pruning."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from legoai.cost.search.placements.program import Node, Placed, PlacementGraph, Strategy, place
from support.marks import NEEDS_SOLVER

pytestmark = NEEDS_SOLVER


def drawn(seed: int) -> tuple[PlacementGraph, list[set[tuple[str, str]]], float | None]:
    """A random graph, with groups that share labels, labels that are forbidden together, and sometimes a limit."""
    draw = random.Random(seed)
    graph = PlacementGraph()
    layouts = "abc"[: draw.choice((2, 3))]
    agreed: list[str] = []
    """Layouts that nodes give in a choice that agrees, unless it is forbidden or keeps too much."""
    for number in range(draw.randint(2, 7)):
        count = min(number, draw.choice((0, 1, 1, 2)))
        inputs = draw.sample(range(number), count)
        if inputs and draw.random() < 0.2:
            inputs.append(inputs[0])
        group = draw.choice((None, number, "shared", "shared"))
        agreed.append(draw.choice(layouts))
        ways = [("x", tuple(agreed[item] for item in inputs), agreed[-1])] * (draw.random() < 0.95)
        ways += [
            (draw.choice("xyz"), tuple(draw.choice(layouts) for _ in inputs), draw.choice(layouts))
            for _ in range(draw.randint(1, 5))
        ]
        costs = [(draw.choice((0.0, 1e-6, draw.uniform(0.0, 1e-3))), float(draw.randint(0, 2**30))) for _ in ways]
        strategies = tuple(
            Strategy(None if group is None else label, takes, gives, *cost)
            for (label, takes, gives), cost in zip(ways, costs, strict=True)
        )
        graph.add(Node(group, strategies), inputs)
    groups = [node.group for node in graph.nodes().values() if node.group is not None]
    forbidden = [
        {(draw.choice(groups), draw.choice("xyz")) for _ in range(draw.randint(1, 2))}
        for _ in range(draw.choice((0, 0, 1, 2)) if groups else 0)
    ]
    return graph, forbidden, draw.choice((None, 2.0**31))


def every(graph: PlacementGraph) -> Iterator[tuple[dict, float, float]]:
    """All strategies that agree: their labels, seconds and bytes."""
    nodes = graph.nodes()
    for chosen in itertools.product(*(node.strategies for node in nodes.values())):
        labels: dict = {}
        for number, (node, item) in enumerate(zip(nodes.values(), chosen, strict=True)):
            if any(chosen[source].gives != took for source, took in zip(graph.inputs(number), item.takes, strict=True)):
                break
            if node.group is not None and labels.setdefault(node.group, item.label) != item.label:
                break
        else:
            yield labels, sum(item.seconds for item in chosen), sum(item.bytes for item in chosen)


def brute_force(graph: PlacementGraph, forbidden: list, most_bytes: float | None) -> float | None:
    return min(
        (
            seconds
            for labels, seconds, size in every(graph)
            if (most_bytes is None or size <= most_bytes)
            and not any(all(labels.get(group) == label for group, label in pairs) for pairs in forbidden)
        ),
        default=None,
    )


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 400), marks=pytest.mark.slow)])
def test_placement_program_equals_brute_force_on_random_graphs(seeds: range):
    feasible = 0
    for seed in seeds:
        graph, forbidden, most_bytes = drawn(seed)
        least = brute_force(graph, forbidden, most_bytes)
        found = place(graph, forbidden=forbidden, most_bytes=most_bytes)
        if least is None:
            assert found.status == "infeasible", seed
            continue
        feasible += 1
        assert found.status == "optimal", seed
        assert found.seconds == pytest.approx(least, abs=1e-12), seed
        assert found.bound == pytest.approx(least, abs=1e-12), seed
        assert found.bytes <= (most_bytes or float("inf"))
        assert any(
            labels == found.labels and seconds == pytest.approx(least, abs=1e-12) for labels, seconds, _ in every(graph)
        ), seed
    assert feasible > len(seeds) * 5 // 8


def chain(blocks: int, *, labels: str = "xyz") -> PlacementGraph:
    """Consecutive equal blocks, each with two equal layers and a layer that adds both."""
    graph = PlacementGraph()
    last = graph.add(Node(None, (Strategy(None, (), "a"), Strategy(None, (), "b", 1e-5))))
    for _ in range(blocks):
        pair = []
        for _ in range(2):
            strategies = tuple(
                Strategy(label, (took,), gave, 1e-6 * (1 + index + (took != gave)))
                for index, label in enumerate(labels)
                for took in "ab"
                for gave in "ab"[: 1 + index]
            )
            pair.append(graph.add(Node("layers", strategies), [last]))
        last = graph.add(Node(None, tuple(Strategy(None, (one, one), one) for one in "ab")), pair)
    return graph


def test_equal_nodes_are_merged_and_dominated_strategies_removed():
    """The second layer of each pair goes with the first, so that the program is not twice as large."""
    found = place(chain(1, labels="x"))
    assert found.seconds == pytest.approx(2e-6)
    assert found.variables <= 5
    double = PlacementGraph()
    for cost in (2.0, 1.0):
        double.add(Node("one", (Strategy("x", (), "a", cost), Strategy("x", (), "a", 3 * cost))))
    merged = place(double)
    assert (merged.variables, merged.seconds) == (1, pytest.approx(3.0))


def test_long_chain_is_solved_quickly():
    """Sixty blocks that share their labels: pruned, built and solved without branching worth its name."""
    found: Placed = place(chain(60))
    assert found.status == "optimal"
    assert found.seconds == pytest.approx(120e-6)


def test_missing_input_label_is_infeasible_without_a_solver():
    graph = PlacementGraph()
    first = graph.add(Node(None, (Strategy(None, (), "a"),)))
    graph.add(Node(None, (Strategy(None, ("b",), "a"),)), [first])
    found = place(graph)
    assert (found.status, found.variables, found.labels) == ("infeasible", 0, {})
