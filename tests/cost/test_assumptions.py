"""Assumptions of an estimate that follow from the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.assumptions import of_kernels
from legoai.dsl.lint import lint

PLAN = """plan small
model gpt2("small", vocab_size = {})
cluster h100_sxm
batch (global = 8, micro = 1, seq_len = 1024)
mesh (dp_shard = 8)
fsdp blocks on dp_shard
"""


@pytest.mark.parametrize(
    ("vocabulary", "assumed"),
    [
        (50257, ["products of logits over 50,257 tokens, not a multiple of 8, are as fast as those of a multiple"]),
        (50304, []),
    ],
)
def test_products_of_odd_sizes_are_assumed_to_be_as_fast(vocabulary: int, assumed: list[str]):
    analysis = lint(PLAN.format(vocabulary), "small.plan", directory=Path()).analysis
    assert analysis is not None
    assert analysis.manifest is not None
    assert list(of_kernels(analysis.plan, analysis.manifest, Path())) == assumed
