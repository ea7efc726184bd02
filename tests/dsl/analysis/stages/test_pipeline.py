"""Facts about a pipeline's stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis import batch
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism import crossings
from legoai.dsl.analysis.stages import pipeline
from legoai.dsl.lint import lint
from legoai.specs.directives.pipeline import V_SHAPED

PLAN = """plan staged
model   llama3("tiny", n_layers = 6)
cluster cpu(devices = 8)
batch   (global = 32, micro = 2, seq_len = 64)
mesh    ({mesh})
fsdp on dp_shard
{body}
"""


def analysis_of(body: str, *, mesh: str = "pp = 2, dp_shard = 4", directory: Path = Path()) -> Analysis:
    linted = lint(PLAN.format(mesh=mesh, body=body), "s.plan", directory=directory)
    assert linted.analysis is not None
    return linted.analysis


def test_blocks_are_split_evenly_with_embedding_first_and_output_last() -> None:
    found = crossings.cuts(analysis_of("pipeline on pp", mesh="pp = 4, dp_shard = 2"))
    assert isinstance(found, crossings.Cuts)
    assert found.stages == (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3", "layers.4"),
        ("layers.5", "norm", "output"),
    )
    assert found.starts == ("layers.1", "layers.3", "layers.5")


@pytest.mark.parametrize(
    ("schedule", "count", "ranks"),
    [
        ("1F1B", 2, ((0,), (1,))),
        ("Interleaved1F1B", 4, ((0, 2), (1, 3))),
        ("ZBVZeroBubble", 4, ((0, 3), (1, 2))),
        ("LoopedBFS, stages = 6", 6, ((0, 2, 4), (1, 3, 5))),
    ],
)
def test_stages_are_assigned_to_ranks_by_the_schedule(
    schedule: str, count: int, ranks: tuple[tuple[int, ...], ...]
) -> None:
    analysis = analysis_of(f"pipeline on pp (schedule = {schedule})")
    assert pipeline.stage_count(analysis) == count
    assert pipeline.stages_of_ranks(analysis) == ranks


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_a_v_without_two_stages_on_each_rank_assigns_none(stages: int) -> None:
    for schedule in V_SHAPED:
        analysis = analysis_of(f"pipeline on pp (schedule = {schedule}, stages = {stages})")
        assert pipeline.stages_of_ranks(analysis) == ()


def test_an_order_file_decides_the_stages_and_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text("0F0,0F1,0B0,0B1,1F0,1B0\n2F0,2I0,2W0,,3F0,3B0\n")
    plan = 'pipeline on pp (schedule = csv("order.csv"))'
    analysis = analysis_of(plan, directory=tmp_path)
    assert pipeline.stage_count(analysis) == 4
    assert pipeline.stages_of_ranks(analysis) == ((0, 1), (2, 3))
    assert pipeline.splits_backward(analysis)
    fewer = analysis_of(plan.replace("))", "), stages = 2)"), directory=tmp_path)
    assert pipeline.stages_of_ranks(fewer) == ()


def test_an_order_file_with_unequal_numbers_of_stages_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text("0F0,0B0,2F0,2B0\n1F0,1B0\n")
    analysis = analysis_of('pipeline on pp (schedule = csv("order.csv"))', directory=tmp_path)
    assert [item.message for item in crossings.supports(analysis)] == [
        "`order.csv` lays unequal numbers of stages on the ranks of `pp`"
    ]


@pytest.mark.parametrize(
    "split", ["[layers.9]", "[layers.2, layers.4]", "[tok_embeddings]", "[layers]", "[layers.2.attention]"]
)
def test_invalid_split_points_give_no_stages(split: str) -> None:
    analysis = analysis_of(f"pipeline on pp (split = {split})")
    assert pipeline.first_modules(analysis) is None
    assert crossings.cuts(analysis) is None
    assert crossings.crossing_shapes(analysis) == {}


def test_stage_of_returns_the_stage_of_a_module() -> None:
    analysis = analysis_of("pipeline on pp (split = [layers.2])")
    found = [pipeline.stage_of(analysis, path) for path in ("tok_embeddings", "layers.1.attention", "layers.2", "")]
    assert found == [0, 0, 1, None]


def test_tensors_between_stages_have_local_shapes() -> None:
    whole = analysis_of("pipeline on pp")
    assert set(crossings.crossing_shapes(whole).values()) == {(2, 64, 128)}
    sharded = analysis_of(
        "pipeline on pp\nshard on tp {\n  tok_embeddings = rowwise(output = shard(1))\n"
        "  layers.*.{attention,ffn}_norm = sequence\n  layers.*.attention = inputs(from = shard(1), to = replicate)\n"
        "  layers.*.attention.{wq, wk, wv} = colwise\n  layers.*.attention.wo = rowwise(output = shard(1))\n"
        "  layers.*.feed_forward = inputs(from = shard(1), to = replicate)\n"
        "  layers.*.feed_forward.{w1, w3} = colwise\n  layers.*.feed_forward.w2 = rowwise(output = shard(1))\n"
        "  norm = sequence\n  output = colwise(input = shard(1), output = replicate)\n}",
        mesh="pp = 2, dp_shard = 2, tp = 2",
    )
    assert set(crossings.crossing_shapes(sharded).values()) == {(2, 32, 128)}


def test_sharded_norm_output_crosses_stages_as_a_plain_tensor() -> None:
    rules = (
        "shard on tp {{\n  tok_embeddings = rowwise(output = shard(1))\n  norm = {norm}\n"
        "  layers.* = inputs(from = shard(1), to = replicate, then = outputs(from = replicate, to = shard(1)))\n"
        "  output = colwise(input = shard(1), output = replicate)\n}}\npipeline on pp (split = [output])"
    )
    for norm, shape in (("sequence", None), ("sequence(local = true)", (2, 32, 128))):
        found = analysis_of(rules.format(norm=norm), mesh="pp = 2, dp_shard = 2, tp = 2")
        assert crossings.crossing_shapes(found) == {"output": shape}


@pytest.mark.parametrize(
    ("microbatches", "each", "passes"), [("", 4, 1), (" (microbatches = 2)", 2, 2), (" (microbatches = 3)", 3, None)]
)
def test_micro_batches_are_counted_per_rank_and_per_pass(microbatches: str, each: int, passes: int | None) -> None:
    plan = analysis_of(f"pipeline on pp{microbatches}").plan
    assert batch.samples_at_once(plan) == 8
    assert batch.micro_batches(plan) == 4
    assert batch.pass_micro_batches(plan) == each
    assert batch.passes(plan) == passes
