"""Lower bounds of models in which some parameters have no gradients, against the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.communication.units_in_backward import units_in_backward
from legoai.cost.search.lower_bounds.update import seconds_of_update
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.marks import slow_but
from support.simulation.simulator import in_the_simulator

TEXT = """\
plan test
model python("support.models.frozen_models:{factory}", dim = 4096, depth = 4)
cluster h100_sxm(hosts = 2, devices = 1, fabric = infiniband_ndr)
batch (global = 4, micro = 1, seq_len = 16)
mesh (dp_shard = 2)
fsdp on dp_shard (backend = {backend}) {{ layers.* = unit(reshard = {reshard}), spare = unit }}
optimizer adamw(lr = 1e-3)
"""


def compared(factory: str, reshard: str, backend: str) -> dict[str, tuple[float, float]]:
    """Bounds, each with what is simulated."""
    text = TEXT.format(factory=factory, reshard=reshard, backend=backend)
    if factory != "spare_layer":
        text = text.replace(", spare = unit", "")
    linted = lint(text, "test.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    analysis, bounds = linted.analysis, BoundsOf()
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    update = seconds_of_update(analysis, bounds.machine(analysis))
    return {
        "memory": (bounds(analysis).memory, found.peak_active),
        "backward": (float(units_in_backward(analysis).last), found.peak_active),
        "update": (update, found.slowest.breakdown.by_phase["optimizer"]),
        "communication": (bounds.data_parallel.communicates(analysis), found.step_time),
        "time": (bounds.as_sum(analysis), found.step_time),
    }


CASES = [
    *((factory, "eager") for factory in ("whole", "added_layers", "head_alone", "spare_layer")),
    *((factory, "graph") for factory in ("added_layers", "head_alone")),
]


@pytest.mark.parametrize(
    "case",
    slow_but(
        [(*case, reshard) for case in CASES for reshard in ("after_forward", "after_backward")],
        ("whole", "eager", "after_forward"),
        ("added_layers", "eager", "after_backward"),
        ("head_alone", "graph", "after_backward"),
    ),
    ids=", ".join,
)
def test_bounds_are_below_the_simulation(case: tuple[str, str, str]) -> None:
    factory, backend, reshard = case
    for what, (least, simulated) in in_the_simulator(compared, factory, reshard, backend).items():
        assert least <= simulated, what
        assert least > 0.0 or (backend == "graph" and what in ("backward", "communication")), what  # of hooks
