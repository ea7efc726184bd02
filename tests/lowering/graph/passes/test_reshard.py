"""Resharding to a part of the ranks: the groups that gather for backward, and simulated memory."""

from __future__ import annotations

from collections import Counter

import pytest

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Collective
from legoai.lowering.graph.contracts import watched
from legoai.lowering.graph.passes.memory import held
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY
from support.texts.plans import HEAD, lowered

OF_FOUR = HEAD.replace("cpu(devices = 4)", "h100_sxm") + BODY.replace("dp_shard = 2", "dp_shard = 4")


def gathers(text: str) -> tuple[int, int, Counter[tuple[tuple[int, ...], str, str, bool]]]:
    """The peak of a simulation, that of the graph, and the gathers of a step by ranks, axis and direction."""
    peaks = []
    with watched(lambda _, graph: peaks.append(max(held(graph, moments=2)))):
        trace = capture(text, world=4, kind="cuda", rank=3)
    span = trace.steps[-1]
    found = Counter(
        (item.ranks, item.axis, item.phase, item.bytes > 300_000)
        for item in trace.records[span.start : span.stop]
        if isinstance(item, Collective) and item.kind == "all_gather"
    )
    return memory(trace).peak, peaks[-1], found


def gathers_twice(text: str) -> list[tuple[int, int, Counter[tuple[tuple[int, ...], str, str, bool]]]]:
    """Those of two simulations in one process, whose groups are not the same."""
    return [gathers(text) for _ in range(2)]


@pytest.mark.slow
def test_backward_gathers_from_the_partial_reshard_group():
    text = lowered(OF_FOUR.replace("= unit", "= unit(reshard = 2)")).text
    assert "reshard_after_forward=2" in text
    first, second = in_the_simulator(gathers_twice, text)
    assert first == second
    peak, in_graph, found = first
    everyone, two = (0, 1, 2, 3), (2, 3)
    assert found == {
        (everyone, "dp_shard", "forward", False): 1,
        (everyone, "dp_shard", "forward", True): 4,
        (two, "dp_shard_of_2", "backward", True): 4,
    }
    assert 0 <= in_graph - peak < 8 * 512, "the parts are of the graph's memory"
