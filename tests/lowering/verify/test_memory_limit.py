"""The limit of memory of a shrunken plan divides its units into those that stay unsharded and others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from legoai.lowering.graph import StepGraph
from legoai.lowering.verify.prepare import prepare
from support.commands.verified import here, verified  # noqa: F401  the fixture
from support.simulation.simulator import in_the_simulator
from support.simulation.step_graphs import BODY, after_each_pass
from support.texts.plans import HEAD

SELECTIVE = HEAD.replace("devices = 4", "devices = 2") + BODY.replace("reorder = true", "unshard = selective")


def resharded(graph: StepGraph) -> str:
    return json.dumps([[unit.reshard_after_forward, unit.reshard_after_backward] for unit in graph.units])


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["70GiB", "16MiB"])
def test_some_units_stay_unsharded_and_others_do_not(limit: str):
    linted = lint(f"{SELECTIVE}require peak_memory <= {limit}\n", "a.plan", directory=Path())
    assert not [item for item in linted.diagnostics if item.severity == "error"]
    small = prepare(linted, directory=Path())
    found = json.loads(in_the_simulator(after_each_pass, small.program.text, resharded)["unshard_selectively"])
    assert [False, False] in found and [True, True] in found
    assert any(change.startswith("require: peak_memory <= ") for change in small.shrunken.changes)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "offload (optimizer = adaptive, activations = adaptive)\n"])
def test_selectively_unsharded_plan_equals_one_device(more: str, capsys: pytest.CaptureFixture[str]):
    status, out, _ = verified(capsys, f"{SELECTIVE}{more}require peak_memory <= 1GiB\n")
    assert status == 0, out
    assert "require: peak_memory <= " in out and "a.plan: 2 ranks compute what one device computes" in out
