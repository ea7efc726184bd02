"""Pipelines of models whose stages send tensors of other layouts than [batch, length, features]."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.trace.records import Collective
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.marks import slow_but
from support.simulation.simulated import in_a_fork

SAMPLES, TOKENS, DIM = 2, 24, 32
PLAN = f"""plan theirs
model   python("support.models.factories:NAME", dim = {DIM}, depth = 4)
cluster cpu(devices = 2)
batch   (global = 8, micro = {SAMPLES}, seq_len = {TOKENS})
mesh    (pp = 2)
pipeline on pp (schedule = 1F1B)
precision (param = fp32)
"""


def _sent(text: str) -> list[int]:
    """Bytes of each message between stages that the first rank sends or receives in a step."""
    linted = lint(text, "a.plan", directory=Path(__file__).parents[2])
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    analysis = linted.analysis
    assert analysis is not None
    assert analysis.manifest is not None
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    first = found.ranks[0]
    return [
        item.bytes
        for item in first.trace.between(first.span)
        if isinstance(item, Collective) and item.kind in ("send", "recv")
    ]


@pytest.mark.parametrize("name", slow_but(["build", "build_tokens_first", "build_flat"], "build_tokens_first"))
def test_stages_of_any_layout_are_costed(name: str):
    sent = in_a_fork(_sent, PLAN.replace("NAME", name))
    assert sent
    assert set(sent) == {4 * SAMPLES * TOKENS * DIM}
