"""A program whose ranks hold different experts trains as one process with all experts does."""

from __future__ import annotations

from pathlib import Path

import pytest

import legoai
from support import ROOT
from support.marks import slow_but
from support.texts.plans import PIECES_OF_EXPERTS, SEQUENCE_BESIDE_EXPERTS, errors, lowered
from support.training.meshed import TRAINING, UNITS
from support.training.staged import DOUBLE, PLAIN_DOUBLE, TOLERANCE, assert_close, train

HEAD = """\
plan sparse

model   mixtral("8x7b", n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, hidden_dim = 24, vocab_size = 256,
                n_experts = 8, top_k = 2, max_seq_len = 64)
cluster cpu(devices = 4)
"""
EXPERTS = "shard on ep { layers.*.feed_forward.experts = experts }\n"
DROPPING = "shard on ep { layers.*.feed_forward.experts = experts(capacity_factor = 0.75) }\n"
ATTENTION = """\
shard on tp {
  tok_embeddings                   = rowwise
  layers.*.attention.{wq, wk, wv}  = colwise
  layers.*.attention.wo            = rowwise
  output                           = colwise(loss_parallel = true)
}
"""

PLANS = {
    "two groups": f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS}fsdp on dp_shard {UNITS}{DOUBLE}",
    "every rank with other experts": f"mesh (dp_shard = 4, ep = 4)\n{EXPERTS}fsdp on dp_shard {UNITS}{DOUBLE}",
    "with checkpointing, kept after forward": f"""
mesh (dp_shard = 4, ep = 2)
{EXPERTS}
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), layers.*.feed_forward.experts = unit, root = unit }}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "selectively recomputed, one rank for each expert": f"""
mesh (dp_shard = 4, ep = 4)
{EXPERTS}
fsdp on dp_shard {UNITS}
checkpoint {{ layers.0 = selective([matmul, collective]), layers.1 = budget(50%) }}
{DOUBLE}""",
    "recomputed as TorchTitan does": f"""
mesh (dp_shard = 4, ep = 2)
{EXPERTS}
fsdp on dp_shard {UNITS}
checkpoint {{
  layers.* = selective(
    [attention, alternate_matmul, "_c10d_functional.all_to_all_single.default", "aten.topk.default"]
  )
}}
{DOUBLE}""",
    "replicated": f"""
mesh (dp_replicate = 2, dp_shard = 2, ep = 2)
{EXPERTS}
fsdp on dp_replicate, dp_shard {UNITS}
{DOUBLE}""",
    "over context and data ranks": f"""
mesh (dp_shard = 2, cp = 2, ep = 4)
{EXPERTS}
context on cp
fsdp on dp_shard, cp {UNITS}
{DOUBLE}""",
    "beside tensor parallel attention, with checkpointing": f"""
mesh (dp_shard = 2, tp = 2, ep = 2)
{ATTENTION}{EXPERTS}
fsdp on dp_shard {UNITS}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "beside tensor and sequence parallel": f"""
mesh (dp_shard = 2, tp = 2, ep = 2)
{SEQUENCE_BESIDE_EXPERTS}{EXPERTS}
fsdp on dp_shard {UNITS}
{DOUBLE}""",
    "across tensor parallel ranks, one group": f"""
mesh (dp_shard = 2, tp = 2, ep = 4)
{PIECES_OF_EXPERTS}
fsdp on dp_shard {UNITS}
checkpoint {{ layers.* = full }}
{DOUBLE}""",
    "across tensor parallel ranks, two groups": f"""
mesh (dp_shard = 2, tp = 2, ep = 2)
{PIECES_OF_EXPERTS}
fsdp on dp_shard {UNITS}
{DOUBLE}""",
    "across tensor parallel ranks of replicas": f"""
mesh (dp_replicate = 2, tp = 2, ep = 2)
{PIECES_OF_EXPERTS}
fsdp on dp_replicate, dp_shard {UNITS}
{DOUBLE}""",
    "beside context ranks that hold the same": f"""
mesh (dp_shard = 2, cp = 2, ep = 2)
{EXPERTS}
context on cp
fsdp on dp_shard {UNITS}
{DOUBLE}""",
    "over context ranks alone": f"""
mesh (cp = 4, ep = 2)
{EXPERTS}
context on cp (rotate = alltoall)
fsdp on cp {UNITS}
{DOUBLE}""",
}


def text_of(body: str, head: str = HEAD) -> str:
    return lowered(f"{head}{TRAINING}{body}").text


@pytest.fixture(scope="module")
def alone(gloo, data) -> dict:
    """The plan on one process, which holds all experts."""
    [result] = gloo(1)(train, text_of(PLAIN_DOUBLE), data)
    return result


@pytest.mark.parametrize(
    "name",
    slow_but(PLANS, "over context and data ranks", "across tensor parallel ranks, one group"),
)
def test_expert_parallelism_equals_one_process(name: str, gloo, data, alone):
    for result in gloo(4)(train, text_of(PLANS[name]), data):
        assert_close(result, alone, TOLERANCE)


def test_few_experts_are_sharded_within_each_expert(gloo, data):
    head = HEAD.replace("n_experts = 8", "n_experts = 2").replace("top_k = 2", "top_k = 1")
    program = text_of(f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS}fsdp on dp_shard {UNITS}{DOUBLE}", head)
    assert "shard_placement_fn=lambda _: Shard(1)" in program
    [one] = gloo(1)(train, text_of(PLAIN_DOUBLE, head), data)
    for result in gloo(4)(train, program, data):
        assert_close(result, one, TOLERANCE)


def test_capacity_drops_equal_tokens_on_one_and_four_ranks(gloo, data, alone):
    program = text_of(f"mesh (dp_shard = 4, ep = 4)\n{DROPPING}fsdp on dp_shard {UNITS}{DOUBLE}")
    [one] = gloo(1)(train, text_of(f"{DROPPING}{PLAIN_DOUBLE}"), data)
    assert one["loss"] != pytest.approx(alone["loss"], abs=1e-6)
    for result in gloo(4)(train, program, data):
        assert_close(result, one, TOLERANCE)


def resumed(first: str, second: str, data: str, out: str) -> dict:
    """Train the first step under one program and the rest under another."""
    train(first, data, out=Path(out), steps=1)
    return train(second, data, out=Path(out), resume_other_plan=True)


@pytest.mark.slow
def test_checkpoint_continues_with_another_expert_layout(gloo, data, alone, tmp_path):
    across = "across tensor parallel ranks, two groups"
    names = ("two groups", "every rank with other experts", across, "over context ranks alone")
    for first, second in zip(names, (*names[1:], names[0]), strict=True):
        programs = text_of(PLANS[first]), text_of(PLANS[second])
        [result, *_] = gloo(4)(resumed, *programs, data, str(tmp_path / first))
        assert_close(result, {**alone, "loss": alone["loss"][1:], "norm": alone["norm"][1:]}, TOLERANCE)


@pytest.mark.slow
def test_mixed_precision_trains_close_to_full_precision(gloo, data):
    [single] = gloo(1)(train, text_of("precision (param = fp32)"), data)
    program = f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS}fsdp on dp_shard {UNITS}precision (param = bf16, reduce = fp32)"
    for result in gloo(4)(train, text_of(program), data):
        assert result["loss"] == pytest.approx(single["loss"], rel=1e-2)


@pytest.mark.slow
def test_compiled_blocks_with_experts_equal_one_process(gloo, data, alone):
    compiled = "compile { layers.* = aot_eager(fullgraph = false) }\n"
    for result in gloo(4)(train, text_of(f"{PLANS['two groups']}{compiled}"), data):
        assert_close(result, alone, TOLERANCE)


GROUPS_BESIDE_CONTEXT = f"""
mesh (dp_shard = 4, cp = 2, ep = 2)
{EXPERTS}
context on cp (rotate = allgather)
fsdp on dp_shard {UNITS}
{DOUBLE}"""


@pytest.mark.slow
def test_experts_on_eight_ranks_with_replicas_and_stages_equal_one_process(gloo, data, alone):
    plans = (
        GROUPS_BESIDE_CONTEXT,
        GROUPS_BESIDE_CONTEXT.replace("on dp_shard", "on dp_shard (backend = graph)"),
        f"""
mesh (dp_replicate = 2, dp_shard = 2, cp = 2, ep = 2)
{EXPERTS}
context on cp
fsdp on dp_replicate, dp_shard {UNITS}
{DOUBLE}""",
        f"""
mesh (dp_replicate = 2, dp_shard = 2, cp = 2, ep = 2)
{EXPERTS}
context on cp
fsdp on dp_replicate, dp_shard, cp {UNITS}
{DOUBLE}""",
        f"""
mesh (pp = 2, dp_shard = 2, tp = 2, ep = 2)
pipeline on pp (schedule = 1F1B, microbatches = 2)
{ATTENTION}{EXPERTS}
fsdp on dp_shard {{ layers.* = unit(reshard = after_backward), root = unit }}
{DOUBLE}""",
    )
    for plan in plans:
        for result in gloo(8)(train, text_of(plan), data):
            held = {name: alone["parameters"][name] for name in result["parameters"]}
            assert_close(result, {**alone, "parameters": held}, TOLERANCE)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (f"mesh (dp_shard = 4, ep = 2)\nfsdp on dp_shard {UNITS}", "LP306", "no statement uses the 2 ranks of `ep`"),
        (
            f"mesh (dp_replicate = 2, cp = 2, ep = 2)\n{EXPERTS}replicate on dp_replicate\ncontext on cp",
            "LP010",
            "`ep` groups ranks of `dp_shard`",
        ),
        (f"mesh (dp_shard = 4, ep = 3)\n{EXPERTS}fsdp on dp_shard {UNITS}", "LP309", "`ep` = 3 does not divide"),
        (
            f"mesh (dp_shard = 2, cp = 2, ep = 4)\n{EXPERTS}context on cp\nfsdp on dp_shard {UNITS}",
            "LP010",
            "`ep` = 4 does not divide the 2 ranks",
        ),
        (
            f"mesh (cp = 4, ep = 4)\n{EXPERTS}context on cp\nfsdp on dp_shard {UNITS}"
            "comm { layers.* = bucket(bytes(1MiB)) }",
            "LP010",
            "`ep` = 4 does not divide the 1 ranks",
        ),
        (
            "mesh (dp_shard = 4, ep = 2)\nshard on ep { layers.* = experts }\nfsdp on dp_shard",
            "LP407",
            "`experts` is for the experts",
        ),
        (
            f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS}fsdp on dp_shard {{ layers.* = unit(reshard = 4) }}",
            "LP010",
            "`reshard = 4` does not divide the 2 ranks that hold the same experts",
        ),
        (
            f"mesh (dp_shard = 4, ep = 2)\n{EXPERTS}fsdp on dp_shard {UNITS}compile {{ layers.* = inductor }}",
            "LP630",
            "`layers.0` cannot be one graph",
        ),
        (
            f"mesh (dp_shard = 2, tp = 2, ep = 2)\nshard on tp {{ layers.*.feed_forward.experts.w1 = shard(1) }}\n"
            f"{EXPERTS}fsdp on dp_shard {UNITS}",
            "LP010",
            "`layers.0.feed_forward.experts` (Experts) computes with `w1` in a forward of its own",
        ),
    ],
)
def test_lint_reports_unsupported_expert_parallelism(text: str, code: str, message: str):
    assert errors(f"{HEAD}{TRAINING}{text}")[code].startswith(message)


def test_expert_mesh_is_created_once():
    text = legoai.lower(ROOT / "plans" / "mixtral_8x7b_64.plan").text
    assert text.count("split_off_experts(") == 1
    assert '    expert_mesh = split_off_experts(mesh["dp_shard"], ep=8)  # mixtral_8x7b_64.plan:8\n' in text
    assert '    apply_expert_parallel(model, expert_mesh["ep"])' in text
    assert '    apply_fsdp(model, mesh["dp_shard"], expert_mesh["dp_shard_mod_ep"])' in text


def test_experts_of_replicas_between_shards_have_a_joined_mesh():
    text = text_of(GROUPS_BESIDE_CONTEXT)
    assert '    expert_mesh = split_off_experts(join_axes(mesh, ("cp",), ("dp_shard",)), ep=2)' in text
    assert 'join_axes(expert_mesh, ("cp",), ("dp_shard_mod_ep",))' in text
    sixteen = HEAD.replace("devices = 4", "devices = 16") + TRAINING.replace("global = 8", "global = 16")
    both = GROUPS_BESIDE_CONTEXT.replace("mesh (", "mesh (dp_replicate = 2, ").replace(
        "fsdp on", "fsdp on dp_replicate,"
    )
    assert 'join_axes(expert_mesh, ("dp_replicate_cp",), ("dp_shard_mod_ep",))' in lowered(f"{sixteen}{both}").text
