"""Tests of the rules about experts beside other statements."""

from __future__ import annotations

import pytest

from support.rule_plans import message

EXPERTS = "shard on ep {{ layers.*.feed_forward.experts = {} }}"
MANY = 'model mixtral("tiny")\nmesh (dp_shard = 4, ep = 2)\nfsdp on dp_shard\n' + EXPERTS.format("experts")
ONE = 'model mixtral("tiny")\nmesh (dp_shard = 4)\nfsdp on dp_shard\n' + EXPERTS.format(
    "experts(capacity_factor = 1.25)"
)


@pytest.mark.parametrize("plan", [MANY, ONE])
@pytest.mark.parametrize("compiled", ["layers.*.feed_forward = inductor", "layers.*.feed_forward.experts = aot_eager"])
def test_experts_that_wait_for_numbers_of_tokens_are_in_no_whole_graph(plan: str, compiled: str):
    found = message(f"{plan}\ncompile {{ {compiled} }}", "LP630")
    assert found.startswith("`layers.0.feed_forward")
    assert "differs from call to call" in found
