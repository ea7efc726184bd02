"""Bounds on memory, exposed communication and gradient accumulation around backward, against simulations."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import Estimate, estimate
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidate_bounds.data_parallel import DataParallelBounds
from legoai.cost.search.candidate_bounds.memory import least_memory
from legoai.cost.search.lower_bounds.communication.units_in_backward import UnitsInBackward, units_in_backward
from legoai.cost.search.lower_bounds.gradient_accumulation import adding_up
from legoai.cost.trace.records import Kernel
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.state import summed_gradients
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.marks import slow_but, some_slow
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan small
model llama3("1b", n_layers = 6, tie_embeddings = false)
cluster h100_sxm(hosts = {hosts}, devices = {devices}, fabric = infiniband_ndr)
attention flash
batch (global = {batch}, micro = {micro}, seq_len = 2048)
mesh ({mesh})
{body}"""
SHARDED = """\
fsdp blocks on dp_shard {{ layers.* = unit(reshard = {reshard}) }}
checkpoint {{ layers.* = {treatment} }}
precision (param = bf16, reduce = fp32)
"""
FLOAT8 = "precision (param = bf16, reduce = fp32) { layers.*.feed_forward.* = float8 }\nfsdp blocks on dp_shard\n"
SELECTIVE = "selective([attention, alternate_matmul])"


def analysed(
    body: str, *, hosts: int = 1, devices: int = 8, batch: int = 8, micro: int = 1, mesh: str = ""
) -> Analysis:
    text = PLAN.format(
        hosts=hosts, devices=devices, batch=batch, micro=micro, mesh=mesh or f"dp_shard = {hosts * devices}", body=body
    )
    linted = lint(text, "small.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    return linted.analysis


def simulated(analysis: Analysis) -> Estimate:
    return estimate(lower(analysis), analysis.plan, analysis.manifest)


def peaks(reshard: str, treatment: str, batch: int) -> tuple[float, int, UnitsInBackward]:
    analysis = analysed(SHARDED.format(reshard=reshard, treatment=treatment), batch=batch)
    return least_memory(analysis, 0), simulated(analysis).peak_active, units_in_backward(analysis)


@pytest.mark.parametrize("batch", some_slow([8, 16], 16))
@pytest.mark.parametrize(
    ("reshard", "treatment"),
    [
        pytest.param("after_forward", "full", marks=pytest.mark.slow),
        ("after_forward", SELECTIVE),
        pytest.param("after_backward", "full", marks=pytest.mark.slow),
        pytest.param("after_forward", "selective([attention])", marks=pytest.mark.slow),
        pytest.param("never", SELECTIVE, marks=pytest.mark.slow),
    ],
)
def test_units_and_activations_bound_is_below_the_peak(reshard: str, treatment: str, batch: int):
    least, peak, units = in_the_simulator(peaks, reshard, treatment, batch)
    assert 0 < units.before < units.last
    assert least <= peak
    # Without what units hold it is no more than this.
    assert least - max(units) < 0.85 * peak < least


def of_budget() -> tuple[float, int]:
    body = SHARDED.format(reshard="after_forward", treatment="full").replace("layers.* = full", "PATH = budget(0.1)")
    analysis = analysed(body.replace("PATH", "layers.*.feed_forward"))
    return least_memory(analysis, 0), simulated(analysis).peak_active


def test_budget_bound_is_below_the_peak():
    least, peak = in_the_simulator(of_budget)
    assert 0 < least <= peak


def waits() -> tuple[float, float]:
    analysis = analysed(SHARDED.format(reshard="after_forward", treatment="none"), hosts=4, batch=256, micro=4)
    bounds = BoundsOf()
    besides = DataParallelBounds(bounds.layers, bounds.room).of(analysis)
    return besides.exposed, simulated(analysis).exposed_communication


def test_exposed_communication_bound_is_below_the_simulation():
    least, exposed = in_the_simulator(waits)
    assert 0.5 * exposed < least <= exposed


PIPELINED = """\
fsdp blocks on dp_shard {{ layers.* = unit(reshard = after_backward) }}
pipeline on pp (schedule = {schedule})
precision (param = bf16, reduce = fp32)
"""


def sums(schedule: str) -> tuple[float, float]:
    """Least seconds in which a mean rank adds up gradients, and those of its kernels that do."""
    analysis = analysed(PIPELINED.format(schedule=schedule), devices=4, mesh="pp = 2, dp_shard = 2")
    found, ranks = simulated(analysis), 2
    cost = OpCosts(machine=found.machine)
    took = 0.0
    for rank in found.ranks:
        for item in rank.trace.records:
            is_sum = isinstance(item, Kernel) and item.op == "aten.add_" and item.phase == "backward"
            # Of parameters, and not of activations [samples, tokens, features].
            if is_sum and item.stream == 0 and len(item.inputs[0].shape) < 3:
                took += cost(item).seconds
    least = adding_up(analysis, found.machine, summed_gradients(analysis) / ranks, halves="Zero" in schedule)
    return least, took / ranks / 2  # of two steps


@pytest.mark.parametrize("schedule", slow_but(["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"], "1F1B"))
def test_gradient_accumulation_bound_is_below_the_simulation(schedule: str):
    least, took = in_the_simulator(sums, schedule)
    assert 0.29 * took < least <= took


def test_float8_has_no_bounds_around_backward():
    analysis = analysed(FLOAT8, batch=16)
    bounds = BoundsOf()
    assert units_in_backward(analysis).second == 0
    assert DataParallelBounds(bounds.layers, bounds.room).of(analysis).exposed == 0.0
    assert adding_up(analysis, bounds.machine(analysis), 1e9, halves=False) == 0.0
