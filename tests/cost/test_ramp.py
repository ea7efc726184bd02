"""A growing batch is costed at its full size, and the estimate states that."""

from __future__ import annotations

from legoai.cost.assumptions import of_full_batch
from legoai.cost.capture import capture
from legoai.cost.trace.records import Mark
from support.simulation.simulator import in_the_simulator
from support.texts.plans import HEAD, lowered, resolved

PLAN = f"{HEAD.replace('devices = 4', 'devices = 1')}batch (global = 16, micro = 2, seq_len = 16)\n"
GROWING = PLAN.replace("seq_len = 16", "seq_len = 16, ramp = stages(global = [2, 8], until = [10, 20])")


def micro_batches(text: str) -> int:
    trace = capture(lowered(text), world=1, kind="cpu")
    span = trace.steps[-1]
    found = trace.records[span.start : span.stop]
    return sum(isinstance(item, Mark) and item.name.startswith("micro batch ") for item in found)


def test_simulated_step_has_the_full_batch():
    assert in_the_simulator(micro_batches, GROWING) == in_the_simulator(micro_batches, PLAN) == 8


def test_estimate_states_the_smaller_first_steps():
    words = "steps are of the full batch of 16: the first 20 have smaller ones"
    assert list(of_full_batch(resolved(GROWING))) == [words]
    assert not list(of_full_batch(resolved(PLAN)))
