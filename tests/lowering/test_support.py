"""What families do not support: lint reports it at its line with the code LP010, and lowering raises the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from support.plans import HEAD, refusals

BATCH = "batch (global = 8, micro = 2, seq_len = 32)\n"

CASES = {
    "offload of a graph": (
        "mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)\noffload (optimizer = adaptive,\n"
        "  activations = bytes(1GiB))",
        {2: "backend = graph", 4: "`activations = bytes` of `offload` is not lowered"},
    ),
    "autocast to fp32": ("precision (master = fp64, param = fp32)", {1: "autocast computes in bf16"}),
    "gradient dtype": (
        "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\nprecision (param = fp32,\n  gradient = bf16)",
        {4: "gradients accumulate in the dtype of the stored parameters, which is fp32"},
    ),
    "mxfp8": ("precision { layers.*.feed_forward.* = mxfp8 }", {1: "`mxfp8` is not lowered yet"}),
    "a style of every stage's root": (
        "mesh (pp = 2, tp = 2)\npipeline on pp\nshard on tp {\n  root = inputs(from = replicate, to = replicate)\n}",
        {4: "cannot hold for every stage"},
    ),
    "budgets of all modules together": (
        "checkpoint {\n  layers.* = budget(50%,\n    by = ilp)\n}",
        {3: "needs the search"},
    ),
    "graph backend": ("mesh (dp_shard = 4)\nfsdp on dp_shard (backend = graph)", {2: "backend = graph"}),
}


@pytest.mark.parametrize("name", CASES)
def test_lint_and_lowering_report_the_same(name: str):
    body, expected = CASES[name]
    head = HEAD + BATCH
    linted = lint(head + body, "tiny.plan", directory=Path())
    found = [item for item in linted.diagnostics if item.code == "LP010"]
    offset = head.count("\n")
    assert {item.label.span.line - offset for item in found} == set(expected)
    for item in found:
        assert expected[item.label.span.line - offset] in item.message
        assert item.label.text or item.help
    assert refusals(head + body) == found
