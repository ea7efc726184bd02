"""Active memory of pipelines, and of a step that is traced as a graph, against a real run on the CPU over gloo."""

from __future__ import annotations

import pytest

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from support.marks import slow_but
from support.simulation.simulator import in_the_simulator
from support.texts.combinations import COMBINATIONS, Combination
from support.texts.plans import lowered
from support.training.real_memory import real_peak


def simulated_peaks(text: str, world: int) -> list[int]:
    return [memory(capture(text, world=world, rank=rank, kind="cpu")).peak for rank in range(world)]


HOW = (
    "",
    ", never resharded",
    ", checkpointed",
    ", operators kept",
    ", activations on the host",
    ", optimizer state on the host",
    ", uneven",
)
ROUNDED = (
    "context parallel, as one graph",
    "experts on every rank, as one graph",
)
"""Positions and numbers of rows are a few bytes, each of which counts as a block of 512."""
EXACT = (
    *(f"fsdp, as one graph{how}" for how in HOW),
    *(name for name in COMBINATIONS if name.startswith("pipeline") and name not in ROUNDED),
)
MOST = 2**62
RUNS = 3
"""Runs, of which the least peak counts: under load a thread of gloo lets go late of what it has sent."""
QUICK = ("pipeline, ZBVZeroBubble",)


@pytest.mark.parametrize(
    "name",
    slow_but((*EXACT, *ROUNDED), *QUICK),
)
def test_peak_equals_a_real_run(name: str, gloo):
    compare(COMBINATIONS[name], COMBINATIONS[name].text, gloo, exact=name in EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp, as one graph", "fsdp, as one graph, checkpointed"])
def test_compiled_regions_free_tensors_after_their_last_use(name: str, gloo):
    """With `aot_eager`, as the operators of a real run tell of their memory, and kernels of inductor do not."""
    compare(COMBINATIONS[name], f"{COMBINATIONS[name].text}compile {{ layers.* = aot_eager }}\n", gloo, exact=True)


def compare(combination: Combination, plan: str, gloo, *, exact: bool) -> None:
    text = lowered(plan).text
    found = in_the_simulator(simulated_peaks, text, combination.world)
    real = [MOST] * combination.world
    for _ in range(RUNS):
        real = list(map(min, real, gloo(combination.world)(real_peak, text)))
        if found == real:
            break
    assert found == (real if exact else pytest.approx(real, rel=2e-3))
