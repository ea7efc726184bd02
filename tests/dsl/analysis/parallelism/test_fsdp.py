"""Units of `fsdp`, the axes that shard them, the buckets that join them; all without a plan's text."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication import comm
from legoai.dsl.analysis.parallelism import fsdp, mesh
from legoai.dsl.analysis.support import unsupported
from legoai.dsl.frontend.resolve import resolve
from legoai.specs.models.manifests.load import load_manifest

HEAD = 'plan units\nmodel llama3("tiny")\ncluster cpu(devices = 4)\nbatch (global = 16, micro = 2, seq_len = 64)\n'


def analysis_of(body: str) -> Analysis:
    """The plan and its model alone, as a shrunken plan or one of a search is analysed."""
    plan = resolve(HEAD + body, "u.plan", directory=Path()).plan
    assert plan is not None
    return Analysis(plan, load_manifest(plan.model.source(), base_directory="."), file="u.plan")


UNITS = """mesh (dp_replicate = 2, dp_shard = 2)
fsdp on dp_replicate, dp_shard {
  layers.*           = unit
  layers.1.attention = unit(reshard = 2)
  output             = unit(reshard = never)
}
"""


def test_unit_reshard_comes_from_its_rule_or_the_pytorch_default() -> None:
    units = fsdp.fsdp_units(analysis_of(UNITS))
    assert list(units) == ["", "layers.0", "layers.1", "layers.1.attention", "layers.2", "layers.3", "output"]
    assert (units[""].rule, units[""].reshard) == (None, "after_backward")
    assert units["layers.0"].reshard == "after_forward"
    assert [path for path, unit in units.items() if not unit.is_resharded_after_forward] == ["", "output"]


@pytest.mark.parametrize(
    ("parameter", "unit"),
    [
        ("layers.1.attention.wq.weight", "layers.1.attention"),
        ("layers.1.feed_forward.w1.weight", "layers.1"),
        ("tok_embeddings.weight", ""),
    ],
)
def test_the_deepest_unit_owns_a_parameter(parameter: str, unit: str) -> None:
    assert fsdp.owner(analysis_of(UNITS), parameter) == unit


def test_axis_of_one_rank_is_in_the_mesh_only_if_it_shards() -> None:
    found = analysis_of(UNITS)
    assert mesh.mesh_axes(found) == mesh.data_axes(found) == ("dp_replicate", "dp_shard")
    assert (mesh.replicating_axes(found), mesh.sharded_axes(found)) == (("dp_replicate",), ("dp_shard",))
    assert mesh.shard_ranks(found) == 2
    alone = analysis_of("fsdp on dp_shard { layers.* = unit }")
    assert (mesh.mesh_axes(alone), mesh.shard_ranks(alone)) == (("dp_shard",), 1)


def test_analysis_facts_are_computed_once() -> None:
    found = analysis_of(UNITS)
    assert fsdp.fsdp_units(found) is fsdp.fsdp_units(found)


def test_bucketed_units_are_prefetched_by_their_first_unit() -> None:
    found = analysis_of(
        "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit, output = unit }\n"
        "comm (prefetch = units(forward = 1)) { layers.{0..2} = bucket(group), layers.3 = bucket(module) }"
    )
    assert [bucket.paths for bucket in comm.unit_buckets(found)] == [("layers.0", "layers.1", "layers.2")]
    assert comm.prefetching_units(found) == ("layers.0", "layers.3", "output")
    assert list(unsupported(found)) == []


def test_unsupported_configuration_is_reported_at_its_plan_line() -> None:
    [diagnostic] = unsupported(analysis_of("mesh (dp_shard = 4)\nfsdp on dp_shard\ncomm (reorder = true)"))
    assert (diagnostic.code, diagnostic.label.span.file, diagnostic.label.span.line) == ("LP010", "u.plan", 7)
