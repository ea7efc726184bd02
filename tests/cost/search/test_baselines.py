"""Baselines: the order in which the rule of thumb tries candidates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from legoai.cost.search.baselines import _by_rule
from legoai.cost.search.candidates import Choices
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan

HEAD = """\
plan test
model llama3("tiny", n_layers = 8, n_heads = 16, n_kv_heads = 16, dim = 256)
cluster cpu(devices = 16)
"""
BODIES = {
    "rest is sharded": """\
batch (global = 32, micro = auto, seq_len = 64)
mesh (pp = auto in [1, 2, 4], dp_replicate = auto, dp_shard = rest, tp = auto)
shard standard on tp
fsdp blocks on dp_replicate, dp_shard
pipeline on pp (schedule = auto in [1F1B, Interleaved1F1B])
""",
    "rest is tp": """\
batch (global = 32, micro = auto in [1, 2, 4], seq_len = 64)
mesh (dp_replicate = auto, dp_shard = auto, tp = rest)
shard standard on tp
fsdp blocks on dp_replicate, dp_shard
""",
}


@pytest.mark.parametrize("body", BODIES)
def test_rule_of_thumb_orders_all_legal_candidates(body: str) -> None:
    plan = OpenPlan(lint(HEAD + BODIES[body], "test.plan", directory=Path()), directory=Path())
    own = [index for index, hole in enumerate(plan.holes) if hole.what != "pipeline schedule"]
    way = tuple(None if index in own else 0 for index in range(len(plan.holes)))

    def key(choices: Sequence[int]) -> tuple[object, ...]:
        found = plan.candidate(choices).plan
        return found.mesh.tp * found.mesh.pp, -found.batch.micro_batch, found.mesh.tp, choices

    values = (range(hole.listed) if index in own else (0,) for index, hole in enumerate(plan.holes))
    every = [choices for choices in itertools.product(*values) if not plan.candidate(choices).errors]
    linted: list[Choices] = []

    def legal(choices: Choices) -> Candidate | None:
        linted.append(choices)
        candidate = plan.candidate(choices)
        return None if candidate.errors else candidate

    found = [choices for choices, _ in _by_rule(plan, way, own, legal)]
    assert len(found) > 10
    assert found == sorted(every, key=key)
    all_of_them = len(linted)
    linted.clear()
    next(_by_rule(plan, way, own, legal))
    assert len(linted) < all_of_them / 2 or body == "rest is tp"
