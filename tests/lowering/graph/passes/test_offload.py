"""Offloading of activations in the graph of a step: the choice of tensors, the place of copies, and simulated costs."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import fx

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Copy
from legoai.lowering.graph import StepGraph
from legoai.lowering.graph.passes.blocks import Blocks
from legoai.lowering.graph.passes.offload import saved_activations
from legoai.lowering.graph.step.places import place_of
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY, after_each_pass
from support.texts.plans import HEAD, lowered

ALL = "offload (activations = all)\n"
CALLS = ("to_host", "wait_on_host", "to_device", "wait_on_device")


def call_of(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", "")
    return name if name in CALLS else ""


def copies(graph: StepGraph) -> tuple[int, list[str], Counter[str]]:
    """Bytes that could be offloaded, misplaced copies, and counts of each call."""
    nodes: list[fx.Node] = list(graph.graph.nodes)
    place, blocks, wrong = {node: index for index, node in enumerate(nodes)}, Blocks(graph), list[str]()
    backward = next(index for index, node in enumerate(nodes) if (p := place_of(node)) and p.phase != "forward")
    for node in nodes:
        if call_of(node) == "to_host":
            [value] = node.all_input_nodes
            [wait] = node.users
            [arriving] = wait.users
            [arrived] = arriving.users
            steps = [place[item] for item in (node, wait, arriving, arrived)]
            if steps != sorted(steps) or not steps[1] < backward <= steps[2]:
                wrong.append(f"{node} out of order")
            if any(place[user] > place[wait] for user in value.users):
                wrong.append(f"{value} is held")
            between = {blocks.of(p) for item in nodes[steps[2] : steps[3]] if (p := place_of(item)) and not p.makes}
            if not between - {blocks.of(place_of(next(iter(arrived.users))))}:
                wrong.append(f"{arriving} has no other block's backward to run beside")
    return sum(saved.bytes for saved in saved_activations(graph)), wrong, Counter(map(call_of, nodes))


@pytest.mark.slow
def test_saved_activations_are_offloaded_and_back_a_block_ahead():
    more = "checkpoint { layers.{0, 1} = full, layers.2 = selective([matmul]) }\n"
    found = in_the_simulator(after_each_pass, lowered(HEAD + BODY + more + ALL).text, copies)
    before, _, none = found["overlap_communication"]
    after, wrong, calls = found["offload_activations"]
    assert before > 0 and not any(none[call] for call in CALLS)
    assert after == 0 and not wrong
    assert len({calls[call] for call in CALLS}) == 1 and calls["to_host"] > 8


def leaving(graph: StepGraph) -> dict[str, int]:
    """Bytes that leave by block; where none do, those that could."""
    found: dict[str, int] = {}
    for node in graph.graph.nodes:
        if call_of(node) == "to_host":
            [value] = node.all_input_nodes
            block = ".".join(place_of(value).module.split(".")[:2])
            found[block] = found.get(block, 0) + value.meta["val"].nbytes
    return found or {"": sum(saved.bytes for saved in saved_activations(graph))}


@pytest.mark.slow
def test_byte_limited_offload_is_even_over_blocks():
    text = lowered(f"{HEAD}{BODY}offload (activations = bytes(400KB))\n").text
    assert "partial(offload_activations, most=400000)" in text
    found = in_the_simulator(after_each_pass, text, leaving)
    [total] = found["overlap_communication"].values()
    left = found["offload_activations"]
    assert total > 1.5 * 400_000 and 0.9 * 400_000 < sum(left.values()) <= 400_000
    layers = [size for block, size in left.items() if block.startswith("layers.")]
    assert len(layers) == 4 and max(layers) < 1.3 * min(layers)


def simulated(text: str) -> tuple[int, dict[str, int], set[int]]:
    """Peak memory, bytes of copies by direction that do not block, and the streams of these."""
    trace = capture(text, world=2, kind="cuda")
    span, moved, streams = trace.steps[-1], Counter[str](), set[int]()
    for item in trace.records[span.start : span.stop]:
        if isinstance(item, Copy) and item.stream:
            moved[item.direction] += item.bytes
            streams.add(item.stream)
    return memory(trace).peak, dict(moved), streams


@pytest.mark.slow
def test_offload_lowers_memory_on_separate_copy_streams():
    head = HEAD.replace("cpu(devices = 4)", "h100_sxm")
    body = BODY.replace("seq_len = 16", "seq_len = 256")
    kept, _, _ = in_the_simulator(simulated, lowered(head + body).text)
    peak, moved, streams = in_the_simulator(simulated, lowered(head + body + ALL).text)
    assert peak < kept
    assert moved["device_to_host"] == moved["host_to_device"] > 0
    assert len(streams) == 2
