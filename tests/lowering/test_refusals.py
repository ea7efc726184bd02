"""What cannot be lowered is refused with the plan's line, and all of it at once."""

from __future__ import annotations

import pytest

from legoai.dsl.rules import rule_of
from legoai.lowering.program import LoweringError
from support.plans import FULL, HEAD, SEQUENCE_PARALLEL, lowered, refusals, resolved

BATCH = "batch (global = 8, micro = 2, seq_len = 32)\n"
ILP = "checkpoint { layers.* = budget(50%, by = ilp) }"


def test_all_refusals_come_at_once_in_the_order_of_the_text():
    found = refusals(f"{HEAD}{BATCH}{ILP}\nprecision {{ layers.*.feed_forward.* = mxfp8 }}")
    assert [item.label.span.line for item in found] == [6, 7]


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
