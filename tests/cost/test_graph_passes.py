"""Effects of each pass over the graph of a step, which sum to the estimate of the plan."""

from __future__ import annotations

import re
from typing import Any

import pytest

from legoai.cost.capture import capture
from legoai.cost.estimate import estimate
from legoai.cost.graph_passes import pass_estimates
from legoai.cost.report import document as whole
from legoai.cost.report import graph_passes
from legoai.cost.report.causes import Causes
from legoai.cost.report.pictures import passes_picture
from legoai.cost.trace.records import Collective, Copy, Kernel
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.graph import StepGraph
from legoai.lowering.graph.contracts import watched
from legoai.lowering.graph.step.operators import GATHERS, SCATTERS
from legoai.lowering.program import lower
from legoai.specs.cluster import device
from support.simulation.simulator import in_the_simulator
from support.texts.combinations import COMBINATIONS
from support.texts.plans import HEAD, lowered, manifest_of, resolved

# So wide that the device, and not the host, limits the step: else nothing is gained where communication overlaps.
PLAN = (
    HEAD.replace("cpu(devices = 4)", "h100_sxm").replace(
        '"tiny"', '"tiny", dim = 4096, n_heads = 32, max_seq_len = 4096'
    )
    + """\
batch (global = 16, micro = 2, seq_len = 4096)
mesh  (dp_shard = 8)
fsdp on dp_shard (backend = graph) { layers.* = unit }
comm  (reorder = true)
"""
)
NAMES = ["deduplicate_unshards", "reshard_after_forward", "bucket_units", "overlap_communication"]


def figures() -> tuple[dict[str, Any], str, str, dict[str, Any]]:
    """The passes as JSON, text and picture, and the JSON of the plan."""
    plan = resolved(PLAN)
    analysis = Analysis(plan, manifest_of(plan.model.source()))
    found = pass_estimates(analysis)
    assert analysis.manifest is not None
    plain = whole.document(estimate(lower(analysis), analysis.plan, analysis.manifest), Causes(analysis))
    picture = passes_picture(found, Causes(analysis), name="tiny")
    return graph_passes.document(found), graph_passes.terminal(found), picture, plain


@pytest.mark.slow
def test_pass_differences_sum_to_the_estimate():
    found, text, picture, plan = in_the_simulator(figures)
    assert [item["name"] for item in found["passes"]] == NAMES
    for figure in ("step_time_s", "peak_active_bytes", "exposed_communication_s", "collectives"):
        total = found["traced"][figure] + sum(item["difference"][figure] for item in found["passes"])
        assert total == pytest.approx(found["passes"][-1]["after"][figure], rel=1e-12)
        assert found["difference"][figure] == pytest.approx(total - found["traced"][figure])
    last = found["passes"][-1]["after"]
    assert last["step_time_s"] == plan["step_time_s"]
    assert last["exposed_communication_s"] == plan["exposed_communication_s"]
    assert last["peak_active_bytes"] == plan["memory"]["peak_active_bytes"]
    changed = {item["name"]: item["difference"] for item in found["passes"]}
    assert changed["reshard_after_forward"]["collectives"] == 36  # nine parameters of each of four blocks
    assert changed["bucket_units"]["collectives"] == -(39 + 36 + 39 - 5 - 4 - 5)
    assert changed["bucket_units"]["step_time_s"] < 0
    assert changed["overlap_communication"]["exposed_communication_s"] < 0
    assert changed["overlap_communication"]["peak_active_bytes"] > 0

    lines = text.splitlines()
    assert lines[0] == "tiny: 8 x h100_sxm, 1 host"
    assert lines[2].split("  ")[0] == "passes over the graph of a step"
    rows = ["  as traced", *(f"    {name}" for name in NAMES), "  after all passes", "    in all"]
    assert [line.startswith(f"{row}  ") for line, row in zip(lines[3:], rows, strict=True)] == [True] * 7
    assert lines[5].endswith("+36") and lines[6].endswith("−100")

    texts = re.findall(r"<text[^>]*>([^<]*)", picture)
    lanes = [line for line in texts if line in ("compute", "dp_shard", "copies")]
    assert lanes == ["compute", "dp_shard", "copies"] * 2
    titles = [line for line in texts if "exposed communication" in line]
    assert [line.partition(":")[0] for line in titles] == ["as traced", "after 4 passes"]
    assert picture.count("all_gather") > 2 * found["traced"]["collectives"] // 3


def issued(graph: StepGraph) -> list[tuple[str, int]]:
    """The gathers and reductions of a graph in their order, with the bytes of the whole buffer."""
    found = []
    for node in graph.graph.nodes:
        if node.target in GATHERS:
            found.append(("all_gather", node.meta["val"].nbytes))
        elif node.target in SCATTERS:
            found.append(("reduce_scatter", node.args[0].meta["val"].nbytes))
    return found


def in_graph_and_trace(text: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    graphs = []
    with watched(lambda _, graph: graphs.append(issued(graph))):
        trace = capture(text, world=2, kind="cpu", replay=False)
    seen = trace.records[trace.steps[-1].start : trace.steps[-1].stop]
    kinds = ("all_gather", "reduce_scatter")
    return graphs[-1], [(item.kind, item.bytes) for item in seen if isinstance(item, Collective) and item.kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("fsdp, as one graph", 7),
        ("fsdp, as one graph, checkpointed", 7),
        ("fsdp, as one graph, scheduled by torch", 3),  # all parameters are one bucket
    ],
)
def test_simulated_rank_issues_the_graph_collectives(name: str, least: int):
    """A real rank is tested in `test_against_gloo.py`."""
    text = lowered(COMBINATIONS[name].text).text
    in_graph, seen = in_the_simulator(in_graph_and_trace, text)
    assert len(in_graph) >= least
    assert seen == in_graph * (len(seen) // len(in_graph))


def reads(text: str) -> list[tuple[str, int]]:
    """Reads of device values by the host in forward and backward, with the phase."""
    trace = capture(text, world=2, kind="cpu", replay=False)
    seen = trace.records[trace.steps[-1].start : trace.steps[-1].stop]
    return [
        (item.phase, item.bytes)
        for item in seen
        if isinstance(item, Copy) and item.blocking and item.phase != "optimizer"
    ]


@pytest.mark.slow
def test_row_counts_are_read_in_forward_and_not_in_recomputation():
    graph = COMBINATIONS["experts on every rank, as one graph"].text
    eager = graph.replace("(backend = graph) ", "")
    of_graph = in_the_simulator(reads, lowered(graph).text)
    of_eager = in_the_simulator(reads, lowered(eager).text)
    of_forward = [item for item in of_eager if item[0] == "forward"]
    assert len(of_forward) == 2 * 2 * (1 + 3)  # micro batches, layers; the exchange, and three products of groups
    assert of_graph == of_forward
    assert len(of_eager) == 2 * len(of_forward)


REORDERED = "comm (reorder = true)\n"


def kernels(text: str, kind: str) -> list[tuple[str, str, str]]:
    """The phase, module and operator of each kernel of the blocks in forward and backward, without copies of units."""
    trace = capture(text, world=2, kind=kind, gpu=device("h100_sxm"), replay=False)
    seen = trace.records[trace.steps[-1].start : trace.steps[-1].stop]
    return [
        (item.phase, item.module, item.op)
        for item in seen
        if isinstance(item, Kernel) and item.module.startswith("layers.") and item.phase in ("forward", "backward")
    ]


@pytest.mark.slow
def test_graph_regions_have_the_kernels_of_compiled_modules():
    graph = COMBINATIONS["fsdp, as one graph"].text.replace("cpu(devices = 2)", "h100_sxm")
    graph += "compile { layers.* = inductor }\n"
    of_graph = in_the_simulator(kernels, lowered(graph).text, "cuda")
    of_eager = in_the_simulator(
        kernels, lowered(graph.replace("(backend = graph) ", "").replace(REORDERED, "")).text, "cuda"
    )
    fused = [[item for item in found if item[2].startswith("fused")] for found in (of_graph, of_eager)]
    products = [[item for item in found if item[2] == "aten.mm"] for found in (of_graph, of_eager)]
    assert sorted(products[0]) == sorted(products[1])
    forward = [[item[1:] for item in found if item[0] == "forward"] for found in fused]
    assert forward[0] == forward[1]


@pytest.mark.slow
def test_experts_with_grouped_kernels_are_compiled():
    graph = COMBINATIONS["experts in shards, in bf16, as one graph"].text.replace("cpu(devices = 2)", "h100_sxm")
    found = in_the_simulator(kernels, lowered(f"{graph}compile {{ layers.* = inductor }}\n").text, "cuda")
    inside = {op for phase, module, op in found if phase == "forward" and "feed_forward" in module}
    assert {op for op in inside if not op.startswith("fused")} == {
        "aten.mm", "aten.topk", "aten.index", "aten._grouped_mm",
    }  # fmt: skip
