"""Proactive prefetching within a memory limit, beside what is offloaded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Allocate, Collective
from legoai.lowering.graph import StepGraph
from legoai.lowering.graph.contracts import watched
from legoai.lowering.graph.passes.memory import held
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY
from support.texts.plans import HEAD, lowered

PREFETCH = BODY.replace("reorder = true", "reorder = true, prefetch = proactive(limit = 1GiB)")


@pytest.mark.parametrize("offload", ["optimizer = bytes(64KiB)", "optimizer = adaptive", "activations = all"])
def test_prefetch_keeps_the_memory_limit_beside_offload(offload: str):
    text = lowered(f"{HEAD}{PREFETCH}offload ({offload})\nrequire peak_memory <= 9MiB\n").text
    _, _, behind = text.partition("PASSES = (")[2].partition("\n)")[0].partition("offload_")
    assert f"prefetch_proactively, limit={2**30}, memory={9 * 2**20}, moments=2)" in behind


def peaks(text: str) -> tuple[int, int, int, bool]:
    """Peaks of the graph before and after prefetching, the simulated peak, and whether a gather was moved."""
    found: dict[str, tuple[int, list[str]]] = {}

    def look(name: str, graph: StepGraph) -> None:
        found[name] = max(held(graph, 2)), [node.name for node in graph.graph.nodes]

    with watched(look):
        trace = capture(text, world=2, kind="cuda")
    for record, gather in pairwise(trace.records):
        if isinstance(gather, Collective) and gather.kind == "all_gather":
            assert not isinstance(record, Allocate), "it fills the buffer that it is given"
    (before, order), (after, moved) = found["offload_optimizer_state"], found["prefetch_proactively"]
    return before, after, memory(trace).peak, order != moved


@pytest.mark.slow
def test_prefetch_uses_the_memory_that_offload_leaves():
    head = HEAD.replace("cpu(devices = 4)", "h100_sxm")
    plan = head + PREFETCH.replace("{ layers.* = unit }", "{ layers.* = unit, {tok_embeddings, output} = unit }")
    plan += "offload (optimizer = all, activations = bytes(200KB))\n"
    before, high, _, _ = in_the_simulator(peaks, lowered(plan).text)
    assert before < high
    for limit in (before, (before + high) // 2):
        text = lowered(f"{plan}require peak_memory <= {limit}B\n").text
        _, after, simulated, is_moved = in_the_simulator(peaks, text)
        assert is_moved
        assert after <= limit and abs(simulated - after) < 8 * 512
