"""What cannot be lowered is refused with the plan's line, and all of it at once."""

from __future__ import annotations

import pytest

from legoai.dsl.rules import rule_of
from legoai.lowering.program import LoweringError
from support.plans import FULL, HEAD, SEQUENCE_PARALLEL, lowered, refusals, resolved

BATCH = "batch (global = 8, micro = 2, seq_len = 32)\n"
ILP = "checkpoint { layers.* = budget(50%, by = ilp) }"
UNITS = "{ layers.* = unit, root = unit }"

CASES = {
    "pieces of sequences for nothing": ("mesh (cp = 4)\nfsdp on cp", {1: "what the 4 ranks of `cp` do"}),
    "experts that are none": (
        "mesh (dp_shard = 4, ep = 2)\nfsdp on dp_shard\nshard on ep { layers.* = experts }",
        {3: "`layers.0` is no module of experts"},
    ),
    "no experts": ("mesh (dp_shard = 4, ep = 2)\nfsdp on dp_shard", {1: "which experts the 2 ranks of `ep` hold"}),
    "flex": ("attention flex", {1: "has no such kernel"}),
    "long warm-up": ("schedule cosine(steps = 10, warmup = 11)", {1: "longer than the whole schedule"}),
    "placement of a module": ("mesh (tp = 4)\nshard on tp {\n  layers.0 = replicate\n}", {3: "is a module"}),
    "style of a parameter": ("mesh (tp = 4)\nshard on tp {\n  norm.weight = sequence\n}", {3: "is a parameter"}),
    "placed twice": (
        "mesh (tp = 4)\nshard on tp {\n  output = colwise(output = replicate)\n  output.weight = shard(0)\n}",
        {4: "already places `output.weight`"},
    ),
    "sharded logits": (
        "mesh (tp = 4)\nshard on tp {\n  output = colwise\n}",
        {3: "every rank of `tp` would hold a part"},
    ),
    "loss parallel inside": (
        "mesh (tp = 4)\nshard on tp {\n  layers.0.feed_forward.w1 = colwise(loss_parallel = true)\n}",
        {3: "for the layer whose output the model returns"},
    ),
    "loss parallel of whole logits": (
        "mesh (tp = 4)\nshard on tp {\n  output = colwise(output = replicate, loss_parallel = true)\n}",
        {3: "sharded on the vocabulary"},
    ),
    "too many layouts": (
        "mesh (tp = 4)\nshard on tp {\n  norm = inputs(from = [shard(1), none], to = [replicate, none])\n}",
        {3: "has 1 inputs (x); the rule gives 2 layouts"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_lowered_is_refused_at_its_line(name: str):
    body, expected = CASES[name]
    head = HEAD + BATCH
    found = refusals(head + body)
    offset = head.count("\n")
    assert {item.code for item in found} == {"LP010"}
    assert {item.label.span.line - offset for item in found} == set(expected)
    for item in found:
        assert expected[item.label.span.line - offset] in item.message
        assert item.label.text or item.help


def test_all_refusals_come_at_once_in_the_order_of_the_text():
    found = refusals(f"{HEAD}{BATCH}{ILP}\nprecision {{ layers.*.feed_forward.* = mxfp8 }}")
    assert [item.label.span.line for item in found] == [6, 7]


def test_styles_do_not_untie_embeddings():
    tied = HEAD.replace('llama3("tiny")', 'llama3("tiny", tie_embeddings = true)')
    [finding] = refusals(f"{tied}{BATCH}mesh (tp = 4)\nshard on tp {{ output = colwise(loss_parallel = true) }}")
    assert "`output.weight` shard(0)" in finding.message
    assert "`tok_embeddings.weight` whole on every rank" in finding.message


def test_holes_are_refused_with_a_code_of_their_own():
    body = "mesh (tp = auto in [2, 4])\nfsdp on dp_shard {\n  layers.* = auto\n}\noptimizer adamw(betas = [0.9, auto])"
    found = refusals(HEAD + BATCH + body)
    assert [(item.code, item.label.span.line) for item in found] == [("LP011", 6), ("LP011", 8), ("LP011", 10)]


def test_a_style_on_an_axis_of_one_rank_changes_nothing():
    alone = f"{HEAD}{BATCH}precision (param = fp32)\n"
    program = lowered(f"{alone}{SEQUENCE_PARALLEL}")
    assert program.text.partition("PLAN_HASH")[2][80:] == lowered(alone).text.partition("PLAN_HASH")[2][80:]


def test_the_error_is_readable_on_its_own():
    with pytest.raises(LoweringError, match=r"^tiny\.plan:6:.*: LP010 .*\(and 1 more\)$"):
        lowered(f"{HEAD}{BATCH}{ILP}\nprecision {{ layers.*.feed_forward.* = mxfp8 }}")


@pytest.mark.parametrize("code", ["LP010", "LP011"])
def test_the_codes_have_pages(code: str):
    rule = rule_of(code)
    assert rule is not None
    assert "## Use instead" in (rule.__doc__ or "")


def test_a_plan_that_is_lowered_has_no_refusals():
    assert refusals(FULL) == []
    assert resolved(FULL).name == "tiny"
