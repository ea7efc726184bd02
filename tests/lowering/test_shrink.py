"""A shrunken plan is small and keeps the statements of the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.stages.split_points import SplitPoints
from legoai.dsl.frontend.files.sources import read_base, read_source
from legoai.dsl.frontend.paths import Paths, assign
from legoai.dsl.lint import lint
from legoai.lowering.program import LoweringError
from legoai.lowering.shrink import MAX_RANKS, Shrunken, shrink
from legoai.lowering.shrink_sizes import CannotShrinkError
from legoai.lowering.verify.prepare import prepare
from legoai.specs.directives.base import describe
from legoai.specs.models.configs import DeepSeekConfig, LlamaConfig, MixtralConfig
from support import ROOT
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, manifest_of, resolved

PLANS = ROOT / "plans"
BATCH = "batch (global = 512, micro = 4, seq_len = 8192)\n"


def worked() -> Iterator[tuple[str, str | None]]:
    for path in sorted(PLANS.glob("*.plan")):
        yield path.stem, None
        source = read_source(str(path))
        for variant in lint(
            source.text, source.name, directory=PLANS, read=read_base, variants=False
        ).resolution.variants:
            yield path.stem, variant


def shrunken(text: str, **options: object) -> Shrunken:
    plan = resolved(text)
    return shrink(Analysis(plan, manifest_of(plan.model.source())), **options)  # type: ignore[arg-type]


def big(body: str, *, model: str = 'llama3("8b")', batch: str = BATCH, **options: object) -> Shrunken:
    head = f"plan big\nmodel {model}\ncluster h100_sxm(hosts = 64, fabric = infiniband_ndr)\n"
    return shrunken(f"{head}{batch}{body}", **options)


@pytest.mark.parametrize(("name", "variant"), list(worked()))
def test_worked_plan_shrinks_without_errors(name: str, variant: str | None):
    source = read_source(str(PLANS / f"{name}.plan"))
    linted = lint(source.text, source.name, directory=PLANS, variant=variant, read=read_base, variants=False)
    assert linted.plan is not None
    try:
        small = prepare(linted, directory=PLANS).shrunken.plan
    except LoweringError as error:
        # An option that the plan itself cannot lower need not be lowered in its copy.
        assert {item.code for item in error.diagnostics} == {"LP010"}
        assert linted.analysis is not None
        small = shrink(linted.analysis).plan
    config = small.model.source().config()
    assert small.mesh.world_size <= MAX_RANKS
    assert small.mesh.used() == linted.plan.mesh.used()
    assert config.dim <= 128
    assert config.n_layers <= 8
    assert small.batch.global_batch * small.batch.seq_len <= 1024
    assert small.precision.param == "fp64"
    for keyword in ("fsdp", "replicate", "pipeline", "context", "checkpoint", "compile", "clip"):
        assert (getattr(small, keyword) is None) == (getattr(linted.plan, keyword) is None)


def test_axes_of_several_ranks_shrink_to_two():
    mesh = big("mesh (pp = 4, dp_shard = 16, tp = 8)\npipeline on pp").plan.mesh
    assert (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp) == (2, 1, 2, 1, 2)


def test_axis_of_one_rank_is_unchanged():
    assert big("mesh (dp_shard = 1, tp = 8)\nfsdp on dp_shard { root = unit }").plan.mesh.world_size == 2


def test_partial_reshard_stays_smaller_than_its_axis():
    small = big("mesh (dp_shard = 64)\nfsdp on dp_shard { layers.* = unit(reshard = 8) }").plan
    assert small.mesh.dp_shard == 4
    assert small.fsdp is not None
    assert small.fsdp.rules[0].treatment.reshard == 2


def test_experts_keep_additional_sharding():
    body = "shard on ep { layers.*.feed_forward.experts = experts }\nfsdp on dp_shard { root = unit }"
    some = big(f"mesh (dp_shard = 64, ep = 8)\n{body}", model='mixtral("8x7b")').plan
    assert (some.mesh.dp_shard, some.mesh.ep) == (4, 2)
    none = big(f"mesh (dp_shard = 8, ep = 8)\n{body}", model='mixtral("8x7b")').plan
    assert (none.mesh.dp_shard, none.mesh.ep) == (2, 2)
    config = some.model.source().config()
    assert isinstance(config, MixtralConfig)
    assert config.n_experts > config.top_k
    assert config.n_experts % some.mesh.ep == 0


ACROSS_TP = """
shard standard on tp (sequence, across_tp)
shard standard on ep (across_tp)
fsdp blocks on dp_shard
"""


@pytest.mark.parametrize(
    ("mesh", "small"),
    [
        ("dp_shard = 16, tp = 4, ep = 8", (2, 2, 2)),
        ("dp_shard = 16, tp = 4, ep = 64", (2, 2, 4)),
        ("dp_shard = 1, tp = 8, ep = 8", (1, 2, 2)),
    ],
)
def test_groups_of_experts_keep_the_ranks_of_tp(mesh: str, small: tuple[int, int, int]):
    found = big(f"mesh ({mesh}){ACROSS_TP}", model='deepseek("v3", n_layers = 12)').plan
    assert (found.mesh.dp_shard, found.mesh.tp, found.mesh.ep) == small


def test_dense_blocks_are_those_that_are_kept():
    found = big(f"mesh (dp_shard = 16, tp = 4, ep = 8){ACROSS_TP}", model='deepseek("v3")').plan
    config = found.model.source().config()
    assert isinstance(config, DeepSeekConfig)
    assert config.n_dense_layers == 1


def test_axes_are_dropped_if_ranks_are_too_few():
    body = """
mesh (pp = 4, dp_replicate = 2, dp_shard = 8, tp = 8)
shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }
fsdp on dp_replicate, dp_shard { root = unit }
pipeline on pp
"""
    all_axes = big(body)
    assert all_axes.plan.mesh.world_size == 16
    assert not any("left out" in change for change in all_axes.changes)
    eight = big(body, ranks=8)
    assert eight.plan.mesh.world_size == 8
    assert eight.plan.fsdp is not None
    assert eight.plan.fsdp.axes == ("dp_shard",)
    assert "`dp_replicate` is left out: 16 ranks would be needed, 8 are allowed" in eight.changes
    two = big(body, ranks=2)
    assert two.plan.mesh.used() == ("pp",)
    assert two.plan.shard == ()
    assert two.plan.pipeline is not None
    one = big(body, ranks=1)
    assert one.plan.mesh.world_size == 1
    assert one.plan.pipeline is None


def test_a_graph_keeps_two_ranks_to_gather_over():
    body = """
mesh (pp = 4, dp_shard = 8, tp = 8)
shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }
fsdp on dp_shard (backend = graph) { layers.* = unit(reshard = RESHARD), root = unit }
pipeline on pp
"""
    whole = body.replace("RESHARD", "after_backward")
    assert big(whole, ranks=4).plan.mesh.used() == ("pp", "dp_shard")
    assert big(whole, ranks=2).plan.mesh.used() == ("dp_shard",)
    parts = big(body.replace("RESHARD", "4").replace("pp = 4, ", "").replace("pipeline on pp", ""), ranks=2)
    assert parts.plan.mesh.used() == ("dp_shard",)
    assert "`dp_shard` = 2 has no sub-groups: 8 ranks would be needed, 2 are allowed" in parts.changes
    with pytest.raises(CannotShrinkError, match="gathers over two ranks of `dp_shard` at least, and 1 is allowed"):
        big(whole, ranks=1)
    by_context = "mesh (cp = 8, tp = 8)\ncontext on cp\nfsdp on cp (backend = graph) { layers.* = unit, root = unit }\n"
    assert big(by_context, ranks=2).plan.mesh.used() == ("cp",)


def test_heads_keep_group_ratio_and_share_per_rank():
    config = big(f"mesh (tp = 8)\n{SEQUENCE_PARALLEL}").plan.model.source().config()
    assert isinstance(config, LlamaConfig)
    assert config.n_heads // config.n_kv_heads == 32 // 8
    assert config.n_kv_heads == 2, "one of each rank, as before"
    assert config.vocab_size == 256


def test_undivisible_vocabulary_stays_undivisible():
    small = big("mesh (tp = 4)\nshard on tp { layers.*.mlp.up = colwise }", model='gpt2("small")')
    assert small.plan.model.source().config().vocab_size == 257


def test_tied_embeddings_stay_tied():
    config = big("", model='llama3("1b")').plan.model.source().config()
    assert isinstance(config, LlamaConfig)
    assert config.tie_embeddings


def test_differently_ruled_blocks_keep_their_rules():
    text = """
mesh (dp_shard = 8)
fsdp on dp_shard { layers.{0..9} = unit, layers.{10, 31}.attention = unit, layers.20 = unit }
checkpoint { layers.* = full, layers.3 = none }
"""
    plan = resolved(f'plan big\nmodel llama3("8b")\ncluster h100_sxm\n{BATCH}{text}')
    small = shrunken(f'plan big\nmodel llama3("8b")\ncluster h100_sxm\n{BATCH}{text}')
    assert small.blocks is not None
    for keyword in ("fsdp", "checkpoint"):
        before = treatments(plan, keyword)
        after = treatments(small.plan, keyword)
        assert after, keyword
        assert {small.original(path): value for path, value in after.items()} == {
            path: value for path, value in before.items() if path in {small.original(kept) for kept in modules(small)}
        }
        assert set(map(str, after.values())) == set(map(str, before.values()))


def treatments(plan: object, keyword: str) -> dict[str, object]:
    directive = getattr(plan, keyword)
    paths = Paths(list(manifest_of(plan.model.source()).modules))  # type: ignore[attr-defined]
    found = assign(directive.rules, paths)
    assert not found.unmatched
    assert not found.conflicts
    return {path: describe(rule.treatment) for path, rule in found.by_path.items()}


def modules(small: Shrunken) -> list[str]:
    return list(manifest_of(small.plan.model.source()).modules)


def test_every_n_still_covers_some_blocks():
    small = big("checkpoint { layers.{0..9} = every(4) }")
    assert small.plan.checkpoint is not None
    [rule] = small.plan.checkpoint.rules
    assert (rule.path, rule.treatment.n) == ("layers.{0..1}", 2)
    assert "checkpoint: every(2) for every(4)" in small.changes


def test_first_n_keeps_first_and_other_blocks():
    small = big("checkpoint { layers.* = first(40, full, others = budget(1GiB)) }")
    assert small.plan.checkpoint is not None
    [rule] = small.plan.checkpoint.rules
    assert (rule.path, rule.treatment.n) == ("layers.*", 2)
    assert rule.treatment.others.amount < 2**30
    assert "checkpoint: first(2, …) for first(40, …)" in small.changes


def test_stage_treatments_become_block_rules():
    body = "mesh (pp = 8, dp_shard = 8)\npipeline on pp\ncheckpoint { layers.* = stages([full, first(2, full), "
    small = big(f"{body}selective([attention]), none, none, none, none, none]) }}")
    assert small.plan.checkpoint is not None
    rules = {rule.path: rule.treatment.name for rule in small.plan.checkpoint.rules}
    assert rules == {"layers.0": "full", "layers.{1, 3}": "none", "layers.2": "selective"}
    assert "checkpoint: a rule for each treatment of `layers.* = stages(…)`" in small.changes


def test_stages_per_rank_and_evenness_are_kept():
    small = big("mesh (pp = 8, dp_shard = 8)\npipeline on pp (schedule = Interleaved1F1B, stages = 16)").plan
    assert small.pipeline is not None
    assert small.pipeline.stages == 4
    assert small.model.source().config().n_layers == 4


def test_uneven_stages_stay_uneven():
    body = "mesh (pp = 8, tp = 8)\npipeline on pp (schedule = Interleaved1F1B, stages = 16)"
    small = big(body, model='llama3("405b")').plan
    assert small.model.source().config().n_layers % 4 != 0


def test_named_split_points_name_kept_blocks():
    small = big("mesh (pp = 4, dp_shard = 8)\npipeline on pp (split = [layers.3, layers.20, norm])")
    assert small.plan.pipeline is not None
    assert small.plan.pipeline.split == ("norm",)
    small = big("mesh (pp = 2, dp_shard = 8)\npipeline on pp (split = [layers.20])")
    assert small.plan.pipeline is not None
    [point] = small.plan.pipeline.split
    assert int(small.original(point).split(".")[1]) >= 20
    held = SplitPoints(manifest_of(small.plan.model.source())).stages((point,), 2)
    assert all(any(path.startswith("layers.") for path in stage) for stage in held)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_schedule_gets_enough_micro_batches(schedule: str):
    small = big(f"mesh (pp = 4, dp_shard = 8)\npipeline on pp (schedule = {schedule})").plan
    accumulation = small.batch.global_batch // (small.batch.micro_batch * small.mesh.data_parallel)
    assert accumulation == 4


def test_undivisible_micro_batches_stay_undivisible():
    for schedule in ("GPipe", "Interleaved1F1B", "DualPipeV"):
        batch = BATCH.replace("512", "312").replace("micro = 4", "micro = 1")
        small = big(f"mesh (pp = 4, dp_shard = 24)\npipeline on pp (schedule = {schedule})", batch=batch).plan
        accumulation = small.batch.global_batch // (small.batch.micro_batch * small.mesh.data_parallel)
        assert accumulation % small.mesh.pp == 1


def test_accumulated_micro_batches_stay_at_least_two():
    small = big("mesh (dp_shard = 8)\nfsdp on dp_shard { root = unit }").plan
    assert small.batch.global_batch == small.batch.micro_batch * 2 * 2
    one = big("mesh (dp_shard = 8)\nfsdp on dp_shard { root = unit }", batch=BATCH.replace("512", "32")).plan
    assert one.batch.global_batch == one.batch.micro_batch * 2


def test_sequence_stays_divisible():
    small = big(f"mesh (cp = 4, tp = 8)\ncontext on cp\nloss chunked(12)\n{SEQUENCE_PARALLEL}").plan
    assert small.batch.seq_len % (2 * 2 * 2) == 0
    assert small.batch.seq_len % 12 == 0


def test_gpu_only_options_are_replaced_and_listed():
    small = big("""
mesh (dp_shard = 8)
fsdp on dp_shard { root = unit }
attention flash
compile { layers.* = inductor(mode = max_autotune) }
precision { layers.*.feed_forward.* = float8 }
offload (optimizer = all)
""")
    assert small.plan.attention.kernel == "default"
    assert small.plan.compile is not None
    assert [rule.treatment.name for rule in small.plan.compile.rules] == ["aot_eager"]
    assert small.plan.precision.rules == ()
    assert small.plan.offload is None
    assert small.plan.cluster.device == "cpu"
    for word in ("attention `flash`", "aot_eager", "without float8", "offload"):
        assert any(word in change for change in small.changes), word


def test_graph_offload_is_kept_on_a_cpu():
    small = big(
        "mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
        "offload (activations = adaptive, optimizer = adaptive)\nrequire peak_memory <= 70GiB"
    )
    assert small.plan.offload is not None
    assert (small.plan.offload.activations, small.plan.offload.optimizer) == ("all", "all")
    assert sum("since the limit is that of the whole model" in change for change in small.changes) == 2


@pytest.mark.parametrize(("unshard", "limits"), [("selective", ["peak_memory"]), ("by_unit", [])])
def test_only_a_limit_that_a_pass_reads_is_kept_with_room(unshard: str, limits: list[str]):
    small = big(
        f"mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) {{ layers.* = unit }}\ncomm (unshard = {unshard})\n"
        "require peak_memory >= 1GiB\nrequire mfu >= 10%\nrequire peak_memory < 70GiB"
    )
    assert [item.metric for item in small.plan.require] == limits
    assert all(item.comparison == "<=" and item.bound == 2**40 for item in small.plan.require)


def test_plan_dtypes_can_be_kept():
    small = big("mesh (dp_shard = 8)\nfsdp on dp_shard { root = unit }", batch=BATCH)
    kept = shrunken(
        f'plan big\nmodel llama3("8b")\ncluster h100_sxm\n{BATCH}mesh (dp_shard = 8)\nfsdp on dp_shard',
        double=False,
    )
    assert small.plan.precision.param == "fp64"
    assert (kept.plan.precision.master, kept.plan.precision.param) == ("fp32", "bf16")


def test_master_dtype_equals_param_dtype_without_casts():
    body = "mesh (pp = 4, dp_replicate = 4)\nreplicate on dp_replicate\npipeline on pp\nprecision (param = fp64)"
    small = big(body, ranks=2, double=False)
    assert small.plan.replicate is None
    assert (small.plan.precision.master, small.plan.precision.param) == ("fp64", "fp64")
    assert any("master = fp64" in change for change in small.changes)


def test_explicit_head_dim_stays_explicit():
    for model in ('llama3("8b", head_dim = 64)', 'mixtral("8x7b", head_dim = 64)'):
        config = big("mesh (tp = 2)", model=model).plan.model.source().config()
        assert config.head_dim not in (0, config.dim // config.n_heads)


@pytest.mark.parametrize(("preset", "dense", "lora"), [("v3", 1, True), ("v2_lite", 1, False)])
def test_dense_blocks_groups_of_experts_and_latents_are_left(preset: str, dense: int, lora: bool):
    body = "mesh (dp_shard = 8, tp = 2, ep = 4)\nshard standard on tp\nshard standard on ep\nfsdp blocks on dp_shard"
    config = big(body, model=f'deepseek("{preset}")').plan.model.source().config()
    assert (config.n_dense_layers, config.q_lora_rank > 0) == (dense, lora)
    assert config.n_layers > config.n_dense_layers and config.n_heads % 2 == config.n_experts % 4 == 0
    assert len({config.head_size, config.v_head_dim, config.kv_lora_rank + config.rope_head_dim, config.dim}) == 4
    assert (config.n_groups > 1) == (preset == "v3")


@pytest.mark.parametrize(("patch", "rest"), [(32, 0), (16, 1)])
def test_image_tokens_keep_their_divisibility(patch: int, rest: int):
    model, batch = f'vit("b16", patch_size = {patch})', "batch (global = 64, micro = 1)\n"
    config = big("mesh (tp = 2)", model=model, batch=batch).plan.model.source().config()
    assert config.n_tokens % 2 == rest


def test_bucket_bytes_scale_with_the_model():
    small = big("mesh (dp_replicate = 8)\nreplicate on dp_replicate (bucket = 800MiB)").plan
    assert small.replicate is not None
    assert 1024 < small.replicate.bucket < 2**20


def test_bucket_counts_scale_with_the_blocks():
    body = "mesh (dp_shard = 8)\nfsdp on dp_shard {{ layers.* = unit }}\ncomm {{ layers.{} = bucket([{}]) }}"
    small = big(body.format("*", "1, 4, 8, 8, 11"))
    assert [rule.treatment.by for rule in small.plan.comm.rules] == [(2,)]
    assert "comm: buckets of [2] modules for [1, 4, 8, 8, 11]" in small.changes
    ends = big(body.format("{0, 31}", "2"))
    assert [(rule.path, rule.treatment.by) for rule in ends.plan.comm.rules] == [("layers.{0, 3}", (2,))]
    assert not any(change.startswith("comm") for change in ends.changes)


def test_every_value_keeps_its_span():
    text = f"{HEAD}{BATCH}mesh (dp_shard = 4)\nfsdp on dp_shard {{ layers.* = unit }}"
    plan, small = resolved(text), shrunken(text).plan
    assert small.batch.origin("micro_batch") == plan.batch.origin("micro_batch")
    assert small.mesh.origin("dp_shard") == plan.mesh.origin("dp_shard")
    assert small.fsdp is not None
    assert plan.fsdp is not None
    assert small.fsdp.rules[0].origin == plan.fsdp.rules[0].origin


def test_small_factory_model_is_unchanged_and_large_one_refused():
    plan = resolved(f'plan theirs\nmodel python("torch.nn:Identity")\ncluster cpu\n{BATCH}')
    tiny = manifest_of(resolved(f"{HEAD}{BATCH}").model.source())
    small = shrink(Analysis(plan, tiny))
    assert small.plan.model is plan.model
    assert small.original("layers.3.attention") == "layers.3.attention"
    large = manifest_of(resolved(f'plan big\nmodel llama3("8b")\ncluster cpu\n{BATCH}').model.source())
    with pytest.raises(CannotShrinkError, match=r"has 8,030,261,248 parameters.*--set"):
        shrink(Analysis(plan, large))
