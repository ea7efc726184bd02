"""What families do not support: lint reports it at its line with the code LP010, and lowering raises the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from support.plans import HEAD, refusals

BATCH = "batch (global = 8, micro = 2, seq_len = 32)\n"

CASES = {
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
