"""Digests of plans, which are equal where their programs are."""

from __future__ import annotations

import re

import pytest

from support.texts.plans import lowered, resolved


@pytest.mark.parametrize(
    ("passes", "observed"),
    [
        ("comm (reorder = true)", False),
        ("comm (reorder = by_time)", True),
        ("comm (reorder = true, prefetch = proactive(limit = 1GiB))", True),
        ("comm (unshard = selective)", True),
        ("offload (optimizer = adaptive)", True),
        ("offload (activations = adaptive)", True),
        ("offload (activations = all, optimizer = bytes(1GiB))", False),
    ],
)
def test_plans_with_other_memory_limits_have_another_digest_where_their_programs_differ(passes: str, observed: bool):
    text = (
        'plan limited\nmodel llama3("8b")\ncluster h100_sxm\nbatch (global = 16, micro = 2, seq_len = 8192)\n'
        "mesh (dp_shard = 8)\nfsdp on dp_shard (backend = graph) { layers.* = unit }\n"
        f"checkpoint {{ layers.* = full }}\n{passes}\n"
    )
    needs_limit = "adaptive" in passes or "selective" in passes
    limits = (
        "",
        "require reserved_memory <= 60GiB\n",
        "require peak_memory <= 70GiB\n",
        "require peak_memory <= 60GiB\n",
    )
    plans = [resolved(text + limit) for limit in (limits[2:] if needs_limit else limits)]
    programs = [re.sub(r"  # .*", "", lowered(plan).text.replace(plan.digest, "")) for plan in plans]
    digests = [plan.digest for plan in plans]
    assert (digests[-1] != digests[-2]) == observed
    assert [programs.index(one) for one in programs] == [digests.index(one) for one in digests]
