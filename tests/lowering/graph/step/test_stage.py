"""Graphs of a pipeline stage's actions: which of them communicate, and that no value crosses without need."""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import fx

from legoai.cost.capture import capture
from legoai.cost.step_graphs import step_graphs
from legoai.cost.trace.records import Collective
from legoai.lowering.graph.step.operators import GATHERS, SCATTERS
from legoai.lowering.graph.step.places import place_of
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
from support.marks import slow_but
from support.simulation.simulator import in_the_simulator
from support.texts.plans import HEAD, lowered

BODY = """\
batch    (global = 16, micro = 2, seq_len = 16)
mesh     (pp = 2, dp_shard = 2)
pipeline on pp (schedule = 1F1B)
fsdp on dp_shard (backend = graph) { layers.* = unit(reshard = after_backward) }
comm     (reorder = true)
"""
SPLIT = BODY.replace("1F1B", "ZBVZeroBubble")
ATEN_MM = torch.ops.aten.mm.default
KINDS = {"all_gather": GATHERS, "reduce_scatter": SCATTERS}


def of_last_stage(text: str) -> dict[str, Seen]:
    """Properties of the graph of each action of the last stage."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        namespace: dict = {"__name__": "program"}
        exec(compile(text, "program.py", "exec"), namespace)
        training = namespace["trainer"]().prepare(Device(type="cpu"), seed=0)
        *_, module = training.parts
        return {name: seen(graph.graph) for name, graph in module.graphs.modules()}
    finally:
        dist.destroy_process_group()


class Seen(NamedTuple):
    """Gathers, reductions, outputs, phases and products of a graph, and unread outputs of forward."""

    gathers: int
    reductions: int
    outputs: int
    phases: set[str]
    products: int
    unread: list[str]


def seen(graph: fx.Graph) -> Seen:
    targets = Counter(node.target for node in graph.nodes)
    [output] = graph.find_nodes(op="output")
    inputs = graph.find_nodes(op="placeholder")
    names = [node.name for node in inputs]
    left = inputs[names.index("gradient") :] if "gradient" in names else []
    places = [place_of(node) for node in graph.find_nodes(op="call_function", target=ATEN_MM)]
    return Seen(
        sum(targets[target] for target in GATHERS),
        sum(targets[target] for target in SCATTERS),
        len(output.args[0]),
        {place.phase for place in places},
        len(places),
        [node.name for node in left if not node.users],
    )


@pytest.mark.parametrize("recomputed", slow_but([False, True], True))
def test_each_stage_action_has_its_part_of_the_graph(recomputed: bool):
    checkpoint = "checkpoint { layers.* = full }\n" if recomputed else ""
    found = in_the_simulator(of_last_stage, lowered(HEAD + BODY + checkpoint).text)
    communication = {name: item[:2] for name, item in found.items() if any(item[:2])}
    assert communication == {"forward": (3, 0), "reduction": (0, 3)}
    assert found["forward"].phases == found["later_forward"].phases == {"forward"}
    assert found["backward"].phases == ({"recompute", "backward"} if recomputed else {"backward"})
    assert found["later_backward"].phases == found["backward"].phases
    assert found["backward"].unread == found["later_backward"].unread == []
    parameters = 20  # two blocks of nine, the last norm, and the output layer
    assert found["forward"].outputs - found["later_forward"].outputs == parameters
    assert (found["backward"].outputs, found["later_backward"].outputs) == (1 + parameters, 1)
    assert found["reduction"].outputs == parameters


@pytest.mark.slow
def test_resharded_units_are_gathered_in_each_action():
    body = BODY.replace("layers.* = unit(reshard = after_backward)", "layers.* = unit")
    found = in_the_simulator(of_last_stage, lowered(HEAD + body).text)
    communication = {name: item[:2] for name, item in found.items() if any(item[:2])}
    blocks = (2, 0)  # the root, with the last norm and the output layer, stays gathered
    assert communication == {
        "forward": (3, 0), "later_forward": blocks, "backward": blocks, "later_backward": blocks, "reduction": (0, 3)
    }  # fmt: skip
    assert found["forward"].outputs - found["later_forward"].outputs == 2
    assert found["backward"].unread == found["later_backward"].unread == []


def ahead(text: str) -> dict[str, int]:
    """Number of gathers that the last stage starts before its first product, by action."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        namespace: dict = {"__name__": "program"}
        exec(compile(text, "program.py", "exec"), namespace)
        [module] = namespace["trainer"]().prepare(Device(type="cpu"), seed=0).parts
        found = {}
        for name, graph in module.graphs.modules():
            targets = [node.target for node in graph.graph.nodes]
            if ATEN_MM in targets:
                found[name] = sum(target in GATHERS for target in targets[: targets.index(ATEN_MM)])
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_stage_gathers_start_as_early_as_the_limit_allows():
    body = BODY.replace("layers.* = unit(reshard = after_backward)", "layers.* = unit, root = unit")
    early = body.replace("reorder = true", "reorder = true, prefetch = proactive(limit = 1GiB)")
    by_one = {"forward": 2, "later_forward": 2, "backward": 1, "later_backward": 1}
    assert in_the_simulator(ahead, lowered(HEAD + body).text) == by_one
    all_of_them = {"forward": 3, "later_forward": 2, "backward": 2, "later_backward": 2}
    assert in_the_simulator(ahead, lowered(HEAD + early).text) == all_of_them


def test_split_backward_halves_have_their_parts():
    found = in_the_simulator(of_last_stage, lowered(HEAD + SPLIT).text)
    assert list(found) == [
        "forward", "later_forward", "input_backward", "weight_backward", "later_weight_backward", "reduction"
    ]  # fmt: skip
    assert {name: item[:2] for name, item in found.items() if any(item[:2])} == {
        "forward": (1, 0), "reduction": (0, 1)  # of one block
    }  # fmt: skip
    products = {name: item.products for name, item in found.items()}
    assert products["input_backward"] == products["weight_backward"] == products["later_weight_backward"] == 7
    assert found["input_backward"].unread == []
    assert found["later_weight_backward"].outputs == 0
    assert found["weight_backward"].outputs == found["reduction"].outputs


@pytest.mark.slow
def test_each_stage_graph_is_printed():
    body = BODY.replace("1F1B", "Interleaved1F1B")
    found = in_the_simulator(functools.partial(step_graphs, lowered(HEAD + body), world=4, kind="cpu"))
    passes = ("trace", "deduplicate_unshards", "bucket_units", "overlap_communication")
    actions = ("forward", "later_forward", "backward", "later_backward", "reduction")
    names = [f"stage_{stage}_{name}" for part in (passes, actions) for stage in (0, 2) for name in part]
    assert list(found) == names
    assert "all_gather" in found["stage_2_forward"]
    assert "all_gather" not in found["stage_2_later_forward"] + found["stage_2_backward"]
    assert "# backward of layers.2" in found["stage_2_backward"]


def issued(text: str) -> list[str]:
    """Gathers and reductions of the last rank in a step on the simulated device."""
    trace = capture(text, world=4, rank=2, kind="cpu", replay=False)
    seen = trace.records[trace.steps[-1].start : trace.steps[-1].stop]
    return [item.kind for item in seen if isinstance(item, Collective) and item.kind in KINDS]


@pytest.mark.slow
def test_simulated_rank_issues_the_stage_graph_collectives():
    """A real rank is tested in `tests/cost/test_against_gloo.py`."""
    assert in_the_simulator(issued, lowered(HEAD + BODY).text) == ["all_gather"] * 3 + ["reduce_scatter"] * 3


def added(text: str) -> tuple[int, set[str]]:
    """Number of accumulations in the later backward of the last stage, and the dtypes added to fp32 sums."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        namespace: dict = {"__name__": "program"}
        exec(compile(text, "program.py", "exec"), namespace)
        [module] = namespace["trainer"]().prepare(Device(type="cpu"), seed=0).parts
        nodes = module.graphs.later_backward.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
        sums = [node.args[0].meta["val"].dtype for node in nodes]
        assert set(sums) == {torch.float32}
        return len(nodes), {str(node.args[1].meta["val"].dtype) for node in nodes}
    finally:
        dist.destroy_process_group()


def test_later_gradients_are_accumulated_without_a_cast_copy():
    mixed = "precision (param = bf16, reduce = fp32)\n"
    assert in_the_simulator(added, lowered(HEAD + BODY + mixed).text) == (20, {"torch.bfloat16"})
