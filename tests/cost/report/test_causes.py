"""Lines that cause communication where several of them communicate between the same ranks."""

from __future__ import annotations

from typing import Any

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.report.budgets import violations
from legoai.cost.report.causes import Causes
from legoai.cost.report.document import document
from legoai.cost.report.lines import line_costs
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import lower
from support.marks import some_slow
from support.simulation.simulator import in_the_simulator
from support.texts.plans import manifest_of, resolved

MIB = 2**20
PEER = 3.28e9 / 7
"""Buffers of an all-to-all for one peer."""

IN_CONTEXT = """\
plan context
model   llama3("tiny")
cluster h100_sxm
batch   (global = 1, micro = 1, seq_len = 128)
mesh    (cp = 8)
fsdp on cp{backend} {{ layers.* = unit, layers.*.attention = unit }}
context on cp{rotate}
"""

EXPERTS = """\
plan experts
model   mixtral("tiny", n_experts = 8)
cluster h100_sxm
batch   (global = 8, micro = 1, seq_len = 64)
mesh    ({mesh})
fsdp blocks on {axes}
shard standard on ep
clip    (norm = 1.0)
"""

PIPELINE = """\
plan stages
model   llama3("tiny")
cluster h100_sxm(devices = 4)
batch   (global = 8, micro = 1, seq_len = 64)
mesh    (pp = 2, dp_shard = 2)
fsdp blocks on dp_shard
pipeline on pp (schedule = {schedule})
"""


def figures(text: str) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """The collectives of a plan with their causes, its exposed communication by axis, and the memory of NCCL."""
    plan = resolved(text)
    analysis = Analysis(plan, manifest_of(plan.model.source()))
    assert analysis.manifest is not None
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    whole = document(found, Causes(analysis))
    return whole["collectives"], whole["exposed_communication_by_axis"], found.ranks[0].use.outside["nccl"]


OPTIMIZERS = """\
plan updates
model   llama3("tiny", dim = 512)
cluster h100_sxm(devices = 4)
batch   (global = 4, micro = 1, seq_len = 64)
mesh    (dp_shard = 2, tp = 2)
fsdp blocks on dp_shard
shard standard on tp (sequence)
optimizer adamw(lr = 1e-3) { layers.* = muon(lr = 1e-2) }
"""

ON_HOST = """\
plan on_host
model   llama3("tiny")
cluster h100_sxm(devices = 2)
batch   (global = 2, micro = 1, seq_len = 64)
mesh    (dp_shard = 2)
fsdp blocks on dp_shard
offload (parameters = all)
"""


def lines(text: str) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """What each line causes, by its first word, and the seconds that kernels take in each phase."""
    plan = resolved(text)
    analysis = Analysis(plan, manifest_of(plan.model.source()))
    assert analysis.manifest is not None
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    written = text.splitlines()
    costs = [item.document() for item in line_costs(found, Causes(analysis))]
    parts = found.slowest.breakdown
    known = {**parts.by_phase, "copies": parts.copies, "host": parts.host}
    return {written[item["line"] - 1].split()[0]: item for item in costs}, known


def words(item: dict[str, Any]) -> str:
    return item["cause"]["statement"].partition(":")[0]


@pytest.mark.parametrize("backend", ["", pytest.param(" (backend = graph)", marks=pytest.mark.slow)])
def test_parameters_on_the_axis_of_the_context_are_those_of_fsdp(backend: str):
    found, _, _ = in_the_simulator(figures, IN_CONTEXT.format(backend=backend, rotate=""))
    kinds = {(words(item), item["kind"], item["phase"]) for item in found if item["phase"] != "optimizer"}
    assert {item["axis"] for item in found} == {"cp"}
    assert kinds == {
        ("fsdp on cp", "all_gather", "forward"),
        ("fsdp on cp", "all_gather", "backward"),
        ("fsdp on cp", "reduce_scatter", "backward"),
        ("context on cp", "all_gather", "forward"),
        ("context on cp", "all_gather", "backward"),
        ("context on cp", "reduce_scatter", "backward"),
    }


@pytest.mark.slow
def test_experts_of_all_sharding_ranks_have_their_own_axis_and_communicator():
    mesh, axes = "dp_replicate = 2, dp_shard = 4, ep = {ep}", "dp_replicate, dp_shard"
    (all_ranks, exposed, large), (some, _, small) = (
        in_the_simulator(figures, EXPERTS.format(mesh=mesh.format(ep=ep), axes=axes)) for ep in (4, 2)
    )
    for found in (all_ranks, some):
        exchanged = [item for item in found if item["kind"] == "all_to_all"]
        assert {(item["axis"], words(item)) for item in exchanged} == {("ep", "shard on ep")}
    assert "ep" in exposed
    # The world, `dp_shard`, `ep` and `dp_replicate`; then also `dp_shard_mod_ep`, and the last three are pairs.
    assert large == pytest.approx((3 * 688 + 544) * MIB + 3 * PEER, rel=0.001)
    assert small == pytest.approx((2 * 688 + 3 * 544) * MIB + PEER, rel=0.001)


@pytest.mark.slow
def test_experts_of_the_whole_world_share_its_communicator():
    found, exposed, nccl = in_the_simulator(figures, EXPERTS.format(mesh="dp_shard = 8, ep = 8", axes="dp_shard"))
    exchanged = {(item["axis"], words(item)) for item in found if item["kind"] == "all_to_all"}
    assert exchanged == {("ep", "shard on ep")}
    assert {item["axis"] for item in found} == {"ep", "dp_shard"} and "ep" in exposed
    assert nccl == pytest.approx(688 * MIB + 7 * PEER, rel=0.001)


@pytest.mark.slow
def test_norm_over_stages_is_caused_by_the_clipping():
    found, _, _ = in_the_simulator(figures, PIPELINE.format(schedule="GPipe") + "clip (norm = 1.0)\n")
    assert {words(item) for item in found if item["phase"] == "optimizer"} == {"clip"}
    assert {words(item) for item in found if item["kind"] in ("send", "receive")} == {"pipeline on pp"}


def test_batches_of_sends_and_receives_need_the_communicator_of_their_group():
    *_, apart = in_the_simulator(figures, PIPELINE.format(schedule="GPipe"))
    *_, mixed = in_the_simulator(figures, PIPELINE.format(schedule="1F1B"))
    assert mixed - apart == 544 * MIB


@pytest.mark.slow
def test_kernels_and_communication_of_muon_are_caused_by_the_optimizer():
    found, phases = in_the_simulator(lines, OPTIMIZERS)
    assert found["optimizer"]["compute_s"] >= phases["optimizer"] > 0
    assert found["optimizer"]["communication_s"] > 0
    collectives, *_ = in_the_simulator(figures, OPTIMIZERS)
    of_update = [item for item in collectives if item["phase"] == "optimizer" and item["kind"] == "all_to_all"]
    assert {words(item) for item in of_update} == {"optimizer"}
    assert {item["axis"] for item in of_update} == {"dp_shard", "tp"}


def test_copies_and_computation_on_the_host_are_caused_by_offload():
    found, parts = in_the_simulator(lines, ON_HOST)
    of_offload = found["offload"]
    assert (of_offload["exposed_copies_s"], of_offload["host_compute_s"]) == (parts["copies"], parts["host"])
    assert parts["copies"] > 0 and parts["host"] > 0
    assert "of computation on the host" in of_offload["text"]


RANGES = """\
plan ranges
model   llama3("tiny")
cluster h100_sxm(devices = 4)
batch   (global = 4, micro = 2, seq_len = 64)
mesh    (dp_shard = 2, tp = 2)
shard on tp {
  layers.{0..1}.feed_forward.{w1, w3} = colwise
  layers.{0..1}.feed_forward.w2       = rowwise
  layers.{2..3}.feed_forward.{w1, w3} = colwise
  layers.{2..3}.feed_forward.w2       = rowwise
}
fsdp on dp_shard {
  layers.{0..1} = unit
  layers.{2..3} = unit(reshard = never)
}
checkpoint {
  layers.{0..1} = selective([matmul, attention])
  layers.2      = none
  layers.3      = full
}
require recompute <= 0.1%
"""


def of_lines(text: str) -> tuple[dict[str, Any], dict[int, dict[str, Any]], str]:
    """The figures of a plan with a violated requirement, what its lines cause, and the help of the violation."""
    plan = resolved(text)
    analysis = Analysis(plan, manifest_of(plan.model.source()))
    assert analysis.manifest is not None
    found, causes = estimate(lower(analysis), analysis.plan, analysis.manifest), Causes(analysis)
    costs = {item.line: item.document() for item in line_costs(found, causes)}
    [violated] = violations(found, causes)
    return document(found, causes), costs, violated.help[0]


def test_equal_modules_under_different_rules_are_told_apart():
    found, costs, most = in_the_simulator(of_lines, RANGES)
    written = RANGES.splitlines()
    first, last, unit, never, kept, _, again = (
        place for place, text in enumerate(written, 1) if text.startswith("  layers") and "w2" not in text
    )
    assert {(row["modules"], row["cause"]["line"]) for row in found["recomputed"]} == {(2, kept), (1, again)}
    products = [row for row in found["recomputed"] if row["operator"] == "aten.mm"]
    assert {row["cause"]["line"] for row in products} == {again}
    assert all(row["calls"] == row["forward_calls"] for row in products)
    assert {line for line, item in costs.items() if item["recompute_s"]} == {kept, again}
    assert most.endswith(f":{kept})")  # attention of two blocks
    of_products = {
        (row["modules"], *(cause["line"] for cause in row["causes"]))
        for row in found["modules"]
        if row["module"] == "layers.*.feed_forward.w1"
    }
    assert {(2, first), (1, last, again)} <= of_products <= {(2, first), (1, last), (1, last, again)}
    gathers = [row for row in found["collectives"] if row["axis"] == "dp_shard" and row["kind"] == "all_gather"]
    assert {row["cause"]["line"] for row in gathers if row["module"] == "layers.*"} == {unit, never}
    assert {row["cause"]["line"] for row in found["memory"]["saved"] if row["operator"] == "aten.mm"} == {kept}
    held = [row for row in found["memory"]["by_module"] if row["module"] == "layers.*"]
    of_units = {cause["line"] for row in held for cause in row["causes"] if cause["statement"].startswith("fsdp")}
    assert of_units == {unit, never} and all(row["modules"] <= 2 for row in held)


UNITS = """\
plan units
model   llama3("tiny")
cluster h100_sxm(devices = 2)
batch   (global = 4, micro = 1, seq_len = 64)
mesh    (dp_shard = 2)
fsdp on dp_shard {
  layers.{0..2}  = unit
  layers.3       = unit(reshard = after_backward)
  tok_embeddings = unit(reshard = after_backward)
  output         = unit
  root           = unit
}
require peak_memory <= 1KiB
"""


def test_parameters_and_gradients_are_caused_by_the_rule_of_their_unit():
    """Whatever module runs while a unit is gathered ahead, or reduced at the end."""
    found, *_ = in_the_simulator(of_lines, UNITS)
    first, last, embeddings, output, root = range(7, 12)
    moved = {
        (row["kind"], row["phase"], row["cause"]["line"]): (row["module"], row["count"])
        for row in found["collectives"]
        if row["kind"] in ("all_gather", "reduce_scatter")
    }
    assert moved == {
        ("all_gather", "forward", first): ("layers.*", 6),
        ("all_gather", "forward", last): ("layers.*", 2),
        ("all_gather", "forward", embeddings): ("tok_embeddings", 2),
        ("all_gather", "forward", output): ("output", 2),
        ("all_gather", "forward", root): ("", 2),
        ("all_gather", "backward", first): ("layers.*", 6),
        ("all_gather", "backward", output): ("output", 2),
        ("reduce_scatter", "backward", first): ("layers.*", 6),
        ("reduce_scatter", "backward", last): ("layers.*", 2),
        ("reduce_scatter", "backward", embeddings): ("tok_embeddings", 2),
        ("reduce_scatter", "backward", output): ("output", 2),
        ("reduce_scatter", "backward", root): ("", 2),
    }


def test_memory_of_a_unit_is_caused_by_its_rule():
    found, costs, _ = in_the_simulator(of_lines, UNITS)
    first, last, embeddings, output, root = (costs[line]["memory_bytes"]["sharded_parameter"] for line in range(7, 12))
    assert first == 3 * last and embeddings == output > root > 0
    for category in ("sharded_parameter", "unsharded_parameter", "sharded_gradient"):
        caused = [item["memory_bytes"].get(category, 0) for item in costs.values()]
        assert sum(caused) == found["memory"]["by_category"][category], category


CHUNKS = """\
plan chunks
model   llama3("tiny")
cluster h100_sxm(devices = 1)
batch   (global = 1, micro = 1, seq_len = 64)
{checkpoint}
loss    chunked(4)
require recompute <= 0%
"""


@pytest.mark.parametrize("checkpoint", some_slow(["", "checkpoint { layers.1 = full }"], ""))
def test_recomputed_chunks_of_a_loss_are_caused_by_the_loss(checkpoint: str):
    found, costs, most = in_the_simulator(of_lines, CHUNKS.format(checkpoint=checkpoint))
    of_loss = [row for row in found["recomputed"] if row["module"] == "loss"]
    assert of_loss
    assert {row["cause"]["line"] for row in of_loss} == {6}
    assert costs[6]["recompute_s"] == pytest.approx(sum(row["seconds"] for row in of_loss))
    assert sum(item["recompute_s"] for item in costs.values()) == pytest.approx(found["recompute_s"])
    [loss] = [row for row in found["modules"] if row["module"] == "loss"]
    assert [cause["line"] for cause in loss["causes"]] == [6]
    assert checkpoint or most.endswith(":6)")


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        pytest.param("dp_shard = 8, ep = 4", "dp_shard", marks=pytest.mark.slow),
        ("dp_replicate = 2, dp_shard = 4, ep = 2", "dp_replicate, dp_shard"),
    ],
)
def test_units_of_experts_are_caused_by_fsdp(mesh: str, axes: str):
    text = EXPERTS.format(mesh=mesh, axes=axes) + "require step_time <= 1us\n"
    found, costs, _ = in_the_simulator(of_lines, text)
    of_experts = [row for row in found["collectives"] if "dp_shard_mod_ep" in row["axis"]]
    assert of_experts
    assert {row["cause"]["line"] for row in of_experts} == {6}
    assert sum(item["communication_s"] for item in costs.values()) == pytest.approx(found["communication_s"])
