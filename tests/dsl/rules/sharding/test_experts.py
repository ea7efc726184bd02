"""Rules about experts in combination with other statements."""

from __future__ import annotations

import pytest

from support.rule_plans import codes, message

EXPERTS = "shard on ep {{ layers.*.feed_forward.experts = {} }}"
MANY = 'model mixtral("tiny")\nmesh (dp_shard = 4, ep = 2)\nfsdp on dp_shard\n' + EXPERTS.format("experts")
ONE = 'model mixtral("tiny")\nmesh (dp_shard = 4)\nfsdp on dp_shard\n' + EXPERTS.format(
    "experts(capacity_factor = 1.25)"
)


@pytest.mark.parametrize("plan", [MANY, ONE])
@pytest.mark.parametrize("compiled", ["layers.*.feed_forward = inductor", "layers.*.feed_forward.experts = aot_eager"])
def test_experts_with_dynamic_token_counts_refuse_full_graph(plan: str, compiled: str):
    found = message(f"{plan}\ncompile {{ {compiled} }}", "LP630")
    assert found.startswith("`layers.0.feed_forward")
    assert "differs from call to call" in found


@pytest.mark.parametrize(
    ("statements", "padded"),
    [
        ("mesh (dp_shard = 8)\nfsdp on dp_shard", False),
        ("mesh (dp_shard = 4)\nfsdp on dp_shard", False),
        ("mesh (dp_shard = 3)\nfsdp on dp_shard", True),
        ("mesh (dp_shard = 16)\nfsdp on dp_shard (backend = graph)", True),
        ("mesh (dp_replicate = 2, dp_shard = 8)\nfsdp on dp_replicate, dp_shard", False),
        ("mesh (dp_replicate = 16)\nreplicate on dp_replicate", False),
    ],
)
def test_uneven_expert_shards_are_padded(statements: str, padded: bool):
    assert ("LP835" in codes(f'model mixtral("tiny", n_experts = 8)\n{statements}')) == padded


def test_expert_padding_diagnostic_is_avoided_by_expert_parallelism():
    plan = 'model mixtral("tiny", n_experts = 4)\nmesh (dp_shard = 16)\nfsdp on dp_shard'
    assert message(plan, "LP835").endswith("padded to 4 times their size")
    on_ep = plan.replace("16", "16, ep = 4") + "\nshard standard on ep"
    assert "LP835" not in codes(on_ep)


@pytest.mark.parametrize(
    ("precision", "compiled", "refused", "warned"),
    [
        ("param = fp32", "layers.* = inductor", True, True),
        ("param = fp32", "layers.* = inductor(fullgraph = false)", False, True),
        ("param = fp32", "layers.* = aot_eager", False, True),
        ("param = fp32", "layers.*.attention = inductor", False, False),
        ("param = bf16", "layers.* = inductor", False, False),
    ],
)
def test_built_in_experts_compile_in_bf16(precision: str, compiled: str, refused: bool, warned: bool):
    plan = 'model mixtral("tiny")\nmesh (dp_shard = 4)\nfsdp on dp_shard\n'
    found = codes(f"{plan}precision ({precision})\ncompile {{ {compiled} }}")
    assert ("LP630" in found, "LP637" in found) == (refused, warned)


def test_experts_that_are_not_compiled_multiply_in_any_dtype():
    assert "LP637" not in codes(
        f"{MANY}\nprecision (param = fp32)\ncompile {{ layers.* = aot_eager(fullgraph = false) }}"
    )
    traced = MANY.replace("fsdp on dp_shard", "fsdp on dp_shard (backend = graph)")
    assert not {"LP630", "LP637"} & set(codes(f"{traced}\nprecision (param = fp32)\ncompile {{ layers.* = inductor }}"))


@pytest.mark.parametrize(("factor", "idle"), [("4", True), ("8", True), ("3.9", False), ("auto in [4, 8]", False)])
@pytest.mark.parametrize("mesh", ["dp_shard = 8, ep = 4", "dp_shard = 8"])
def test_capacity_with_room_for_all_tokens_is_reported(factor: str, idle: bool, mesh: str):
    plan = f'model mixtral("tiny", n_experts = 8, top_k = 2)\nmesh ({mesh})\nfsdp on dp_shard\n'
    assert ("LP837" in codes(plan + EXPERTS.format(f"experts(capacity_factor = {factor})"))) is idle
