"""Operators that a policy names, and that no module under it calls."""

from __future__ import annotations

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.report.causes import Causes
from legoai.cost.report.checkpointing import never_called
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator
from support.texts.plans import manifest_of, resolved

PLAN = """\
plan named
model   {model}
cluster {device}(devices = 2)
batch   (global = 4, micro = 2, seq_len = 64)
mesh    ({axis} = 2)
checkpoint {{ {modules} = selective([{operators}]) }}
"""


def idle(text: str) -> list[str]:
    """What is said of the operators of a plan that nothing calls."""
    plan = resolved(text)
    analysis = Analysis(plan, manifest_of(plan.model.source()))
    assert analysis.manifest is not None
    return [item.message for item in never_called(estimate(lower(analysis), plan, analysis.manifest), Causes(analysis))]


COLLECTIVES = '"_c10d_functional.all_gather_into_tensor", "_c10d_functional.broadcast"'
EXPERTS = {
    "model": 'mixtral("tiny", n_layers = 1)',
    "device": "a100_sxm80",
    "modules": "layers.*.feed_forward.experts",
    "operators": '"aten._grouped_mm", "aten.mm"',
}
"""Products that an A100 computes group by group."""


@pytest.mark.parametrize(
    ("values", "statement", "unused"),
    [
        ({"axis": "tp", "operators": COLLECTIVES}, "shard standard on tp (sequence)", "_c10d_functional.broadcast"),
        ({"operators": '"aten._unsafe_view", "aten.view", "aten.addmm"'}, "", "aten.addmm"),
        pytest.param(
            {"modules": "layers.*.feed_forward", "operators": '"aten.mm", "aten.silu"'},
            "compile { layers.* = inductor }",
            "",
            marks=pytest.mark.slow,
        ),
        (EXPERTS, "", "aten.mm"),
    ],
    ids=["collectives", "views", "inside of compiled", "group by group"],
)
def test_only_operators_that_are_not_called_are_reported(values: dict[str, str], statement: str, unused: str):
    defaults = {
        "model": 'llama3("tiny", n_layers = 1)',
        "device": "h100_sxm",
        "axis": "dp_shard",
        "modules": "layers.*",
    }
    found = in_the_simulator(idle, PLAN.format(**(defaults | values)) + statement + "\n")
    modules = values.get("modules", "layers.*")
    assert found == ([f"`{unused}` keeps nothing: no module of `{modules}` calls it"] if unused else [])
