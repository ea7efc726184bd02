"""Rules about experts in combination with other statements."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from support.texts.rule_plans import codes, diagnostics, message

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


MESH = "mesh (dp_shard = 2, tp = 4, ep = 8)\nfsdp blocks on dp_shard\n"
STANDARD = "shard standard on tp (sequence, across_tp)\nshard standard on ep (across_tp)"
PIECES = f'model mixtral("tiny", n_experts = 8)\n{MESH}{STANDARD}'


def test_experts_across_tp_take_pieces_of_the_sequence():
    assert not [code for code in codes(PIECES) if code < "LP5"]
    standard = PIECES.replace("(sequence, across_tp)", "(sequence)")
    assert "gets all tokens on each of the 4 ranks of `tp`" in message(standard, "LP430")
    unstated = PIECES.replace("shard standard on tp (sequence, across_tp)\n", "")
    assert "gets all tokens on each of the 4 ranks of `tp`" in message(unstated, "LP430")
    alike = PIECES.replace("on ep (across_tp)", "on ep").replace("ep = 8", "ep = 4")
    assert "`layers.*.feed_forward.experts` gets a piece of the sequence" in message(alike, "LP430")
    nowhere = PIECES.replace("\nshard standard on ep (across_tp)", "").replace(", ep = 8", "")
    assert "`layers.*.feed_forward.experts` gets a piece of the sequence" in message(nowhere, "LP430")


def test_layers_of_pieces_sum_their_gradients_over_the_ranks():
    rule = "layers.*.feed_forward.router = sequence(dim = 0, local = true)"
    without = PIECES.replace("across_tp)\nshard", "across_tp) { layers.*.feed_forward.router = unset }\nshard")
    [wrong] = [item for item in diagnostics(without) if item.code == "LP414"]
    assert "`layers.*.feed_forward.router` has no style, and only a piece arrives" in wrong.message
    assert wrong.help[0] == "give it the style `sequence(dim = 0, local = true)`"
    assert "LP414" not in codes(without.replace("layers.*.feed_forward.router = unset", rule))
    by_features = without.replace("layers.*.feed_forward.router = unset", rule.replace("dim = 0", "dim = 1"))
    assert message(by_features, "LP412") == (
        "`sequence` may cut dim 1 of [tokens, features], which `layers.*.feed_forward.router` multiplies"
    )


def test_mixtures_get_plain_pieces():
    wrapped = "layers.*.feed_forward = inputs(from = shard(1), to = shard(1))"
    found = PIECES.replace("across_tp)\nshard", f"across_tp) {{ {wrapped} }}\nshard")
    assert "`layers.*.feed_forward` gets a DTensor, and routes plain tensors" in message(found, "LP430")


@pytest.mark.parametrize(
    ("ep", "problem"),
    [
        (16, "`ep` = 16 does not divide `dp_shard` · `tp` = 8"),
        (2, "`ep` = 2 is no multiple of `tp` = 4, whose ranks `across_tp` takes together"),
    ],
)
def test_groups_across_tp_have_all_of_its_ranks(ep: int, problem: str):
    assert message(PIECES.replace("ep = 8", f"ep = {ep}"), "LP309") == problem


@pytest.mark.parametrize(("rule", "wrong"), [("experts(across_tp = true)", False), ("experts", True)])
def test_groups_of_an_unknown_model_are_as_its_rules_say(rule: str, wrong: bool, tmp_path: Path):
    (tmp_path / "models.py").touch()
    text = 'plan some\nmodel python("models.py:build")\ncluster h100_sxm\nbatch (global = 8, micro = 1, seq_len = 64)\n'
    text += MESH.replace("blocks on dp_shard", "on dp_shard { root = unit }")
    text += f"shard on ep {{ blocks.*.experts = {rule} }}\n"
    found = lint(text, "some.plan", directory=tmp_path, factories=lambda _: False).diagnostics
    assert ("LP309" in {item.code for item in found}) == wrong


def test_all_experts_or_none_are_across_tp():
    rules = "{ layers.0.feed_forward.experts = experts, layers.*.feed_forward.experts = experts(across_tp = true) }"
    found = PIECES.replace("shard standard on ep (across_tp)", f"shard on ep {rules}")
    assert "`ep` groups the same ranks for all" in message(found, "LP010")


def test_experts_across_one_rank_of_tp_are_reported():
    found = (
        'model mixtral("tiny")\nmesh (dp_shard = 16, ep = 4)\nfsdp blocks on dp_shard\nshard standard on ep (across_tp)'
    )
    assert message(found, "LP839") == "`across_tp` has no effect: `tp` has one rank"


def test_graphs_have_no_experts_across_tp():
    found = PIECES.replace("fsdp blocks on dp_shard", "fsdp blocks on dp_shard (backend = graph)")
    assert "`across_tp` of `layers.0.feed_forward.experts` is not lowered" in message(found, "LP010")


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("shard standard on ep (sequence)", "the standard layout on `ep` has no option but `across_tp`"),
        ("shard standard on tp (across_tp)", "`across_tp` needs `sequence`, without which a mixture takes all tokens"),
    ],
)
def test_standard_layouts_across_tp_have_pieces(statement: str, problem: str):
    text = f'plan some\nmodel mixtral("tiny")\ncluster h100_sxm\nbatch (global = 8, micro = 1, seq_len = 64)\n{MESH}'
    found = lint(text + statement, "some.plan", directory=Path()).diagnostics
    assert [item.message for item in found if item.code == "LP227"] == [problem]
    dense = text.replace("mixtral", "llama3") + "shard standard on tp (sequence, across_tp)"
    [problem, *_] = [item.message for item in lint(dense, "some.plan", directory=Path()).diagnostics]
    assert problem == "the standard layout of this model has no form with `across_tp`"


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
